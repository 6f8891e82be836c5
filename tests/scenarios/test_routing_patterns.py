"""The five patterns that RabbitMQ's tutorials teach, told as stories: each works with topics, routes and subjects."""

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

import headrace


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[headrace.Bus]:
    """A broker of one's own."""
    with headrace.open(str(tmp_path / "data")) as bus:
        yield bus


def read(bus: headrace.Bus, topic: str, count: int) -> list[str]:
    """The values of a topic, once there are so many."""
    found: list[str] = []
    while len(found) < count:
        for batch in bus.fetch(topic, 0, len(found), wait=5):
            found += [(value or b"").decode() for value in batch.columns().values]
    return found


def test_work_queue(bus: headrace.Bus) -> None:
    """Tasks are shared by workers: each task is done by one of them, and by another one if the first dies."""
    for task in ("a", "b", "c"):
        bus.publish("tasks", task.encode())
    queue = bus.queue("tasks")
    (first,) = queue.lease(1, lease=0.2)  # a worker that dies with its task
    second, third = queue.lease(2)
    queue.ack([second, third])
    (again,) = queue.lease(1, wait=10)
    assert (again.value, again.deliveries) == (first.value, 2)
    queue.ack([again])
    info = bus.describe_subscription("tasks")
    assert (info.ready, info.leased, info.acked) == (0, 0, 3)


def test_publish_subscribe(bus: headrace.Bus) -> None:
    """Each of several receivers gets all logs: one route to all of their topics, and each topic has a reader."""
    bus.routes.add("fan-out", source="logs", all=True, to=["logs-disk", "logs-screen"])
    for line in ("info: started", "error: no disk"):
        bus.publish("logs", line.encode())
    for receiver in ("logs-disk", "logs-screen"):
        assert read(bus, receiver, 2) == ["info: started", "error: no disk"]


def test_routing(bus: headrace.Bus) -> None:
    """Only errors are written to the disk: the routing key says how severe a line is."""
    bus.routes.add("errors", source="logs", key="error", to="logs-disk")
    for severity in ("info", "error", "warning"):
        bus.routes.add(f"screen-{severity}", source="logs", key=severity, to="logs-screen")
    for line in ("info: started", "error: no disk", "warning: hot"):
        bus.publish("logs", line.encode(), key=line.partition(":")[0])
    assert read(bus, "logs-screen", 3) == ["info: started", "error: no disk", "warning: hot"]
    assert read(bus, "logs-disk", 1) == ["error: no disk"]
    told = bus.routes.explain(source="logs", key="info")
    assert told.targets == ["logs-screen"]


def test_topics(bus: headrace.Bus) -> None:
    """Who speaks and how severe it is are both in the subject; receivers choose by patterns."""
    bus.routes.add("kernel", source="logs", pattern="kern.*", to="kernel")
    bus.routes.add("critical", source="logs", pattern="*.critical", to="critical")
    bus.routes.add("everything", source="logs", pattern="#", to="archive")
    for subject in ("kern.critical", "kern.info", "cron.critical", "cron.info"):
        bus.publish("logs", subject.encode(), key=subject)
    assert read(bus, "kernel", 2) == ["kern.critical", "kern.info"]
    assert read(bus, "critical", 2) == ["kern.critical", "cron.critical"]
    assert len(read(bus, "archive", 4)) == 4


def test_topics_without_a_source(bus: headrace.Bus) -> None:
    """Nobody names a topic: what is published to a subject is live, and stored where a route says so."""
    bus.routes.add("critical", pattern="*.critical", to="critical")
    with bus.subjects.subscribe("kern.*", timeout=5) as live:
        assert bus.subjects.publish("kern.critical", b"1").stored
        assert not bus.subjects.publish("kern.info", b"2").stored
        assert [message.value for message in islice(live, 2)] == [b"1", b"2"]
    assert read(bus, "critical", 1) == ["1"]


def test_remote_procedure_call(bus: headrace.Bus) -> None:
    """A function somewhere else: the request finds a server, and the answer finds who has asked."""
    app = headrace.App(bus)

    @app.serves("fibonacci")
    def fibonacci(request: headrace.IncomingRequest) -> bytes:
        before, now = 0, 1
        for _ in range(int(request.value)):
            before, now = now, before + now
        return b"%d" % before

    server = threading.Thread(target=app.run)
    server.start()
    try:
        while not bus.subjects.info().responders:
            pass
        assert bus.request("fibonacci", b"30").value == b"832040"
    finally:
        app.stop()
        server.join()
