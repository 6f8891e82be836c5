"""A broker is killed whose topic in memory is leased, edited and read by a group: the next messages are others."""

from pathlib import Path

import pytest
from tests.faults.broker_process import SMALL_JOURNAL, BrokerProcess
from tests.faults.fork_server import Nursery

import headrace
from headrace import errors

LIVES = 3
COUNT = 20


def test_messages_in_memory_take_their_offsets_with_them(tmp_path: Path) -> None:
    with Nursery(tmp_path) as nursery:
        broker = BrokerProcess(nursery, tmp_path / "data", *SMALL_JOURNAL)
        given: set[int] = set()
        reminder = ""
        for life in range(LIVES):
            broker.start()
            with broker.connect() as bus:
                bus.create_topic("jobs", exist_ok=True, storage="memory")
                reminder = live(bus, life, given, reminder)
            if life == 1:
                broker.stop()
            else:
                broker.kill()


def live(bus: headrace.Bus, life: int, given: set[int], earlier: str) -> str:
    """Publish, and see that all of it comes; then say so much about it that somebody could take it for another's."""
    receipt = bus.publish("jobs", b"%d first" % life)
    reminder = bus.schedule("jobs", b"%d later" % life, in_=3600)
    wanted = [b"%d.%d" % (life, at) for at in range(COUNT)]
    bus.publish_many("jobs", wanted)
    offsets = range(receipt.offset, receipt.offset + COUNT + 2)
    assert given.isdisjoint(offsets)
    given.update(offsets)
    if earlier:
        with pytest.raises(errors.MessageGone):
            bus.scheduled(earlier).update(value=b"of another message")
    with bus.subscribe("jobs", group="readers", timeout=1) as reader:
        read = [message.value for message in reader]
    assert read == [b"%d first" % life, b"%d later" % life, *wanted]
    reminder.update(value=b"%d changed" % life)
    queue = bus.queue("jobs")
    jobs = queue.lease(COUNT + 2)
    assert [job.value for job in jobs] == [b"%d first" % life, *wanted]
    assert all(job.deliveries == 1 for job in jobs)
    queue.ack(jobs[:5])
    queue.reject(jobs[5:8], "unfit")
    return reminder.id
