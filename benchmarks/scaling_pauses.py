"""Events that must not hold up a broker: a compaction, and very many schedules that are due at once."""

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import count

from benchmarks.loop_pauses import Event, MeteredBroker, Watch
from headrace.bench.event_loop import run_async
from headrace.bench.measure import WrongResult, check
from headrace.client._async.connecting import connect_async
from headrace.client._sync.bus import Bus
from headrace.client._sync.connecting import connect

KEYS = 500_000
SCHEDULES = 10_000
_TOPIC = "bench"
_SEGMENT_BYTES = 4 << 20
_BATCH = 1000
_VALUE = bytes(20)
_COMPACTED = "partition compacted"
"""What a broker logs when it has compacted a partition."""
_MAINTENANCE_S = 0.1
_AT_ONCE = 500
"""Requests that wait for their answers at a time."""
_LEAD_S = 0.5
"""Schedules are due so long after the last of them was set, about."""
_SET_PER_SECOND = 5000
"""How many schedules can be set in a second, unless the machine is busy."""
_PATIENCE_S = 60.0
_POLL_S = 0.02
_AFTERWARDS_S = 0.2
"""How long what follows from an event is watched."""


def compaction(keys: int = KEYS, segment_bytes: int = _SEGMENT_BYTES) -> Event:
    """A topic with so many keys, and a leased subscription of all of its messages, is compacted."""

    def prepare(broker: MeteredBroker) -> None:
        with connect(broker.address) as bus:
            bus.create_topic(_TOPIC, segment_bytes=segment_bytes)
            _publish(bus, keys)
            bus.create_subscription(_TOPIC)

    def happen(broker: MeteredBroker) -> Watch:
        """Send some keys again, more than a segment's worth, and have what they replace removed."""
        with connect(broker.address) as bus:
            _publish_again(bus, keys, 3 * segment_bytes // 2)
            before = broker.logged.count(_COMPACTED)
            with broker.watched() as watch:
                bus.alter_topic(_TOPIC, compact_by_key=True)
                _wait(lambda: broker.logged.count(_COMPACTED) > before, "the topic was not compacted")
                time.sleep(_AFTERWARDS_S)
            bus.alter_topic(_TOPIC, compact_by_key=False)
        return watch

    return Event(
        "compaction", keys, happen, prepare, {"maintenance_seconds": _MAINTENANCE_S, "compact_seconds": _MAINTENANCE_S}
    )


def _publish(bus: Bus, keys: int) -> None:
    with bus.producer(_TOPIC) as producer:
        for first in range(0, keys, _BATCH):
            numbers = range(first, min(first + _BATCH, keys))
            producer.send_many([_VALUE] * len(numbers), keys=[b"%d" % number for number in numbers])
        producer.flush()


def _publish_again(bus: Bus, keys: int, more_bytes: int) -> None:
    """Publish some of the keys until the topic is so much larger."""
    before_bytes = bus.describe_topic(_TOPIC).partitions[0].bytes
    while bus.describe_topic(_TOPIC).partitions[0].bytes < before_bytes + more_bytes:
        _publish(bus, min(keys, 20 * _BATCH))


def mass_schedule(schedules: int = SCHEDULES) -> Event:
    """So many schedules are due in the same moment."""
    topics = (f"{_TOPIC}-{number}" for number in count())

    def happen(broker: MeteredBroker) -> Watch:
        """Set them all anew, and watch them run."""
        with connect(broker.address) as bus:
            topic, due = _set_in_time(broker.address, schedules, topics)
            check(_end(bus, topic) == 0, "schedules have run before they were due")
            time.sleep(max((due - datetime.now(UTC)).total_seconds() - _LEAD_S / 2, 0))
            with broker.watched() as watch:
                _wait(lambda: _end(bus, topic) >= schedules, "not all schedules have run")
                time.sleep(_AFTERWARDS_S)
            check(_end(bus, topic) == schedules, "schedules have run more than once")
        return watch

    return Event("mass schedule", schedules, happen)


def _set_in_time(address: str, schedules: int, topics: Iterator[str]) -> tuple[str, datetime]:
    """Have all schedules due in one moment, which is to come when the last is set; returns their topic and when."""
    needed_s = _LEAD_S + schedules / _SET_PER_SECOND
    while needed_s < _PATIENCE_S:
        topic, due = next(topics), datetime.now(UTC) + timedelta(seconds=needed_s)
        run_async(_set(address, schedules, topic, due))
        if datetime.now(UTC) < due - timedelta(seconds=_LEAD_S / 2):
            return topic, due
        needed_s *= 2
    raise WrongResult(f"{schedules} schedules could not be set in {_PATIENCE_S:g} s")


async def _set(address: str, schedules: int, topic: str, due: datetime) -> None:
    async with await connect_async(address) as bus:
        numbers = iter(range(schedules))

        async def set_some() -> None:
            for number in numbers:
                await bus.cron_add(f"bench-{number}", topic, "every 1h", _VALUE, start=due, runs_max=1)

        await asyncio.gather(*(set_some() for _ in range(_AT_ONCE)))


def _end(bus: Bus, topic: str) -> int:
    return bus.describe_topic(topic).partitions[0].next_offset


def _wait(reached: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not reached():
        if time.monotonic() > deadline_s:
            raise WrongResult(otherwise)
        time.sleep(_POLL_S)
