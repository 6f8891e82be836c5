"""What the model of a broker knows about counts, forecasts and messages that were redriven."""

from itertools import pairwise
from typing import Any

from tests.faults.leased_asking import Asking
from tests.faults.leased_sight import TOPIC
from tests.faults.leased_world import Id


class Counting(Asking):
    """Answers about many messages at once."""

    def has_dead(self) -> bool:
        """Whether there is anything to redrive."""
        entries = [entry for one in self.world.subscriptions.values() for entry in one.entries.values()]
        return any(entry.fate == "dead" for entry in entries)

    def come_back(self, name: str, origins: list[Id]) -> None:
        """What was redriven is at the end of the log, for one subscription only."""
        world = self.changed()
        there = {one.id: one for number in range(self.partitions) for one in self.log(TOPIC, number)}
        fresh = {at: one for at, one in there.items() if at not in world.messages}
        expected = sorted((world.messages[at].value, world.messages[at].key, at[0]) for at in origins)
        assert sorted((one.value, one.key, one.id[0]) for one in fresh.values()) == expected
        for origin in origins:
            world.subscriptions[name].entries[origin].fate = "redriven"
        keys = [("entry", name, at) for at in [*origins, *fresh]]
        for one in fresh.values():
            self.name(one.id, one.value)
            assert one.only == name
            assert not [header for header in one.headers if header.startswith("headrace-dead")]
            world.add(one)
        self.count(keys, synced=True)()

    def check_counts(self, name: str, info: Any) -> None:
        world, now_us = self.world, self.now_us
        entries = world.subscriptions[name].entries
        statuses = [world.status(at, entry, now_us) for at, entry in entries.items()]
        for status in ("waiting", "ready", "leased", "dead"):
            assert getattr(info, status) == statuses.count(status), f"{status}: {info}, {entries}"
        waiting = [world.ready_us(at, e) for at, e in entries.items() if world.status(at, e, now_us) == "waiting"]
        assert info.next_ready_us == min(waiting, default=0)
        ready = [world.messages[at].time_us for at, e in entries.items() if world.status(at, e, now_us) == "ready"]
        redriven = any(message.only for message in world.messages.values())
        assert info.ready_since_us == min(ready, default=0) or (redriven and info.ready_since_us in ready)

    def check_forecast(self, name: str, from_us: int, bucket_us: int, forecast: Any) -> None:
        """The buckets have what comes due in them; what is ready comes before, and what is leased is in none."""
        world, now_us = self.world, self.now_us
        entries = world.subscriptions[name].entries
        statuses = {at: world.status(at, entry, now_us) for at, entry in world.pending(name)}
        times = [world.ready_us(at, entries[at]) for at, status in statuses.items() if status == "waiting"]
        ready = sum(status == "ready" for status in statuses.values())
        edges = [from_us + bucket_us * at for at in range(4)]
        assert forecast.counts == [sum(low <= time < high for time in times) for low, high in pairwise(edges)], forecast
        assert forecast.before == ready + sum(time < from_us for time in times), f"{forecast}, {entries}"
        assert forecast.after == sum(time >= edges[-1] for time in times), f"{forecast}, {entries}"
