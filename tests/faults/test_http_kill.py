"""The broker is killed while clients of HTTP publish and read: nothing is lost, and nothing comes twice."""

import http.client
import threading
import time
import uuid

import pytest
from tests.http_client import EventReader, HttpClient, HttpProcess, needs_http
from tests.known import quick_place

pytestmark = needs_http

MESSAGES = 200
KILLS = 3


def publish_all(server: HttpProcess, done: threading.Event) -> None:
    """Publish each message under a key of its own, again and again until there is an answer."""
    client = HttpClient(server.url)
    for at in range(MESSAGES):
        key = str(uuid.uuid4())
        while True:
            try:
                reply = client.post(
                    "/v1/topics/orders/messages", {"value": at, "partition": at % 2}, Idempotency_Key=key
                )
            except (OSError, http.client.HTTPException):
                client.close()
                time.sleep(0.01)
                continue
            if reply.status == 201:
                break
            assert reply.json["retryable"], reply
            time.sleep(0.01)
    client.close()
    done.set()


def test_a_stream_goes_on_across_kills_and_every_message_comes_once() -> None:
    with quick_place() as place:
        server = HttpProcess(place / "data", "--topic", "partitions=2")
        publisher_done = threading.Event()
        publisher = threading.Thread(target=publish_all, args=(server, publisher_done))
        killer_done = threading.Event()

        def kill_often() -> None:
            for _ in range(KILLS):
                time.sleep(0.4)
                server.kill()
                server.start()
            killer_done.set()

        client = HttpClient(server.url)
        assert client.post("/v1/topics", {"topic": "orders", "settings": {"partitions": 2}}).status == 201
        client.close()
        publisher.start()
        killer = threading.Thread(target=kill_often)
        killer.start()
        seen: list[tuple[int, int]] = []
        values: list[int] = []
        last_id = "0:0,1:0"
        deadline_s = time.monotonic() + 60
        while len(values) < MESSAGES and time.monotonic() < deadline_s:
            try:
                reader = EventReader(server.url, "/v1/topics/orders/messages?group=g", Last_Event_ID=last_id)
                for event in reader:
                    assert event.name == "message", event
                    seen.append((event.data["partition"], event.data["offset"]))
                    values.append(event.data["value"])
                    last_id = event.id
                    if len(values) == MESSAGES:
                        break
                reader.close()
            except (OSError, http.client.HTTPException):
                time.sleep(0.01)
        publisher.join(60)
        killer.join(60)
        assert publisher_done.is_set()
        assert killer_done.is_set()
        assert sorted(values) == list(range(MESSAGES))
        assert sorted(seen) == [(partition, offset) for partition in range(2) for offset in range(MESSAGES // 2)]
        client = HttpClient(server.url)
        assert client.get("/v1/topics/orders/offsets").json == {"offsets": {"0": MESSAGES // 2, "1": MESSAGES // 2}}
        assert client.post("/v1/groups/g/commits", {"topic": "orders", "position": last_id}).status == 204
        assert sum(one["lag"] for one in client.get("/v1/groups").json["groups"]) == 0
        client.close()
        assert server.stop() == 0


@pytest.mark.parametrize("delay_ms", [0, 2, 5])
def test_a_repeated_request_after_a_kill_has_one_effect(delay_ms: int) -> None:
    with quick_place() as place:
        server = HttpProcess(place / "data")
        client = HttpClient(server.url)
        body = [{"value": at} for at in range(20)]
        client._connection.connect()
        threading.Timer(delay_ms / 1000, server.process.kill).start()  # type: ignore[union-attr]
        try:
            first = client.post("/v1/topics/orders/messages", body, Idempotency_Key="k")
        except (OSError, http.client.HTTPException):
            first = None
        client.close()
        server.kill()
        server.start()
        client = HttpClient(server.url)
        again = client.post("/v1/topics/orders/messages", body, Idempotency_Key="k")
        assert again.status == 201
        if first is not None:
            assert again.json == first.json
        page = client.get("/v1/topics/orders/partitions/0/messages").json
        assert [one["value"] for one in page["messages"]] == list(range(20))
        client.close()
        server.kill()
