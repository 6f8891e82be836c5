"""Every setting is altered while messages are published, read and leased: nothing stops, and nothing is lost."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.model.errors import InvalidArgument
from headrace.model.subscription import SubscriptionSettings
from headrace.model.topic import TopicSettings

TOPIC: dict[str, list[dict[str, Any]]] = {
    "partitions": [{"partitions": 3}],
    "storage": [],
    "validity": [{"validity": "until_consumed"}, {"validity": "keep"}],
    "retain_seconds": [{"retain_seconds": 3600}],
    "retain_bytes": [{"retain_bytes": 1 << 30}],
    "ttl_seconds": [
        {"validity": "ttl", "ttl_seconds": 3600},
        {"ttl_seconds": 600},
        {"validity": "keep", "ttl_seconds": None},
    ],
    "segment_bytes": [{"segment_bytes": 16 << 10}],
    "segment_seconds": [{"segment_seconds": 1}],
    "compact_by_key": [{"compact_by_key": True}, {"compact_by_key": False}],
    "message_bytes_max": [{"message_bytes_max": 2 << 20}],
    "durability": [{"durability": "written"}, {"durability": "synced"}],
    "compression": [{"compression": "lz4"}],
    "memory_bytes": [{"memory_bytes": 128 << 20}],
    "middleware": [
        {"middleware": [{"name": "enrich", "fields": ["client"]}]},
        {
            "middleware": [
                {"name": "compress", "codec": "lz4"},
                {"name": "redact", "fields": ["$.a"], "when": "deliver"},
            ]
        },
        {"middleware": []},
    ],
    "middleware_seconds": [{"middleware_seconds": 3.0}],
    "key_versions": [],  # not possible with the retention set above
    "view_of": [],
    "view_query": [],
}
SUBSCRIPTION: dict[str, list[dict[str, Any]]] = {
    "discipline": [{"discipline": one} for one in ("lifo", "priority", "deadline", "fifo")],
    "lease_seconds": [{"lease_seconds": 60}],
    "deliveries_max": [{"deliveries_max": 200}, {"deliveries_max": 0}],
    "dead_letter_topic": [{"dead_letter_topic": "dead"}],
    "expired": [{"expired": "dead"}],
    "retry": [{"retry": "fixed"}],
    "retry_seconds": [{"retry_seconds": 0.01}],
    "retry_seconds_max": [{"retry_seconds_max": 0.1}],
    "retry_jitter": [{"retry_jitter": 0.5}],
    "ordered_by_key": [{"ordered_by_key": True}, {"ordered_by_key": False}],
    "paused": [{"paused": True}, {"paused": False}],
    "rejected": [{"rejected": "drop"}, {"rejected": "dead"}],
    "messages_max": [{"messages_max": 1 << 20}],
    "bytes_max": [{"bytes_max": 1 << 30}],
    "overflow": [{"overflow": "drop_oldest"}, {"overflow": "refuse"}],
    "single_active_consumer": [{"single_active_consumer": True}, {"single_active_consumer": False}],
    "delete_unused_seconds": [{"delete_unused_seconds": 600}],
}


class Load:
    """One who publishes, one who reads as a group, two who lease."""

    def __init__(self, bus: Any) -> None:
        self.bus = bus
        self.published = 0
        self.read: Counter[bytes] = Counter()
        self.acked: Counter[bytes] = Counter()
        self.stopped = threading.Event()
        self.all_published = threading.Event()
        self.failures: list[BaseException] = []
        works = (self.publish, self.consume, self.work, self.work)
        self.threads = [threading.Thread(target=self.run, args=(work,), daemon=True) for work in works]

    def run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 the test tells
            self.failures.append(error)

    def publish(self) -> None:
        while not self.all_published.is_set():
            if self.published - min(len(self.read), len(self.acked)) > 300:
                time.sleep(0.001)  # not further ahead than that
                continue
            values = [b"%d" % (self.published + at) for at in range(20)]
            self.bus.publish_many("jobs", values, keys=[b"%d" % (at % 7) for at in range(20)])
            self.published += 20

    def consume(self) -> None:
        with self.bus.subscribe("jobs", group="readers", start="earliest", timeout=0.2) as reader:
            while not self.stopped.is_set():
                self.read.update(message.value for message in reader)

    def work(self) -> None:
        queue = self.bus.queue("jobs")
        turn = 0
        while not self.stopped.is_set():
            jobs = queue.lease(max=20, wait=0.2)
            turn += 1
            back, done = (jobs[:2], jobs[2:]) if turn % 3 == 0 else ([], jobs)
            if back:
                queue.release(back)
            if done:
                queue.ack(done)
                self.acked.update(job.value for job in done)

    def wait_for(self, what: Callable[[], bool], why: str) -> None:
        deadline = time.monotonic() + 60
        while not what():
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, f"{why}: {self.published} {len(self.read)} {len(self.acked)}"
            time.sleep(0.002)

    def go_on(self, why: str) -> None:
        """All of them make headway."""
        counts = self.published + 20, len(self.read) + 20, len(self.acked) + 20
        self.wait_for(
            lambda: self.published >= counts[0] and len(self.read) >= counts[1] and len(self.acked) >= counts[2], why
        )


@pytest.mark.parametrize(
    "fields", [TopicSettings.__struct_fields__, SubscriptionSettings.__struct_fields__], ids=["topic", "subscription"]
)
def test_every_setting_can_be_altered_under_load(fields: tuple[str, ...], tmp_path: Path) -> None:
    of_topic = "partitions" in fields
    with headrace.open(str(tmp_path / "data")) as bus:
        bus.create_topic("jobs")
        bus.create_subscription("jobs", deliveries_max=0, retry_seconds=0.01, retry_seconds_max=1)
        load = Load(bus)
        for thread in load.threads:
            thread.start()
        load.go_on("at the beginning")
        for name in fields:
            for settings in (TOPIC if of_topic else SUBSCRIPTION)[name]:
                info = bus.alter_topic("jobs", **settings) if of_topic else bus.alter_subscription("jobs", **settings)
                assert settings.items() <= info.settings.items()
                if not settings.get("paused"):
                    load.go_on(f"after {settings}")
        if of_topic:
            with pytest.raises(InvalidArgument):
                bus.alter_topic("jobs", storage="memory")
        load.all_published.set()
        load.threads[0].join()
        total = load.published
        load.wait_for(lambda: len(load.read) == len(load.acked) == total, "at the end")
        load.stopped.set()
        for thread in load.threads:
            thread.join()
        assert not load.failures
        assert set(load.acked.values()) == {1}
