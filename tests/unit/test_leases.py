"""Who holds what: leases of whole ranges and of single messages, against a dictionary that has each message."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.engines.leased import leases
from headrace.engines.leased.leases import LeaseRecord, LeaseTable

END = 12
ranges = st.builds(lambda start, stop: range(start, max(stop, start + 1)), st.integers(0, END - 1), st.integers(1, END))
lists = st.lists(st.integers(0, END - 1), min_size=1, max_size=4, unique=True)
some_offsets: st.SearchStrategy[Sequence[int]] = st.one_of(ranges, lists)


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "WHOLE_MIN", 3)


class Known(NamedTuple):
    """What the dictionary has of a message."""

    number: int
    until_us: int
    over: bool


def known(held: LeaseRecord | None) -> Known | None:
    return None if held is None else Known(held.number, held.until_us, held.over)


class LeasesAgainstADict(RuleBasedStateMachine):
    """Every message has the holder that a dictionary would say it has."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = LeaseTable()
        self.plain: dict[int, Known] = {}
        self.leaving: dict[int, Known] = {}
        self.granted: list[tuple[int, range | Sequence[int]]] = []
        self.reserved: list[LeaseRecord] = []
        self.number = 0
        self.now_us = 0

    @rule(offsets=some_offsets, lasts_us=st.integers(1, 50))
    def hold(self, offsets: Sequence[int], lasts_us: int) -> None:
        if not self.leaving.keys().isdisjoint(offsets):
            return  # nobody gets those
        self.number += 1
        self.leases.hold(self.number, "me", self.now_us + lasts_us, offsets)
        self.plain.update(dict.fromkeys(offsets, Known(self.number, self.now_us + lasts_us, over=False)))
        self.granted.append((self.number, offsets))

    @rule(which=st.integers(0, 20), lasts_us=st.integers(1, 50), part=ranges)
    def extend(self, which: int, lasts_us: int, part: range) -> None:
        if not self.granted:
            return
        number, whole = self.granted[which % len(self.granted)]
        offsets = [offset for offset in whole if offset in part] or whole
        self.leases.extend(number, self.now_us + lasts_us, offsets)
        for offset in offsets:
            if offset in self.plain and self.plain[offset].number == number:
                self.plain[offset] = Known(number, self.now_us + lasts_us, over=False)

    @rule(which=st.integers(0, 20))
    def settle_whole(self, which: int) -> None:
        if self.granted:
            self.forget(self.granted.pop(which % len(self.granted))[1])

    @rule(offsets=some_offsets)
    def forget(self, offsets: Sequence[int]) -> None:
        self.leases.forget(offsets)
        for offset in offsets:
            self.plain.pop(offset, None)
            self.leaving.pop(offset, None)

    @rule(offsets=some_offsets)
    def reserve(self, offsets: Sequence[int]) -> None:
        reserved = self.leases.reserve(offsets)
        taken = {offset: self.plain.pop(offset) for offset in offsets if offset in self.plain}
        assert {offset: known(held) for held in reserved for offset in held.offsets} == taken
        self.reserved += reserved

    @rule()
    def restore(self) -> None:
        taken = self.plain.keys() | self.leaving.keys()
        reserved = [held for held in self.reserved if taken.isdisjoint(held.offsets)]
        self.reserved.clear()
        self.leases.restore(reserved)
        self.plain.update((offset, known(held)) for held in reserved for offset in held.offsets)  # type: ignore[misc]

    @rule(offsets=some_offsets)
    def leave(self, offsets: Sequence[int]) -> None:
        self.leases.leave(offsets)
        self.leaving.update((offset, self.plain.pop(offset)) for offset in offsets if offset in self.plain)

    @rule(offsets=some_offsets)
    def stay(self, offsets: Sequence[int]) -> None:
        self.leases.stay(offsets)
        for offset in offsets:
            if offset in self.leaving:
                self.plain[offset] = self.leaving.pop(offset)._replace(over=True)

    @rule(offset=st.integers(0, END - 1))
    def end_early(self, offset: int) -> None:
        self.leases.end_early(offset)
        if offset in self.plain:
            self.plain[offset] = self.plain[offset]._replace(over=True)

    @rule(us=st.integers(1, 30), most=st.sampled_from([1, 3, 1000]))
    def pass_time(self, us: int, most: int) -> None:
        self.now_us += us
        ended: list[int] = []
        while (end_us := self.leases.first_end_us) is not None and end_us <= self.now_us:
            some = self.leases.end(self.now_us, most)
            assert len(some) <= most
            for offset in some:
                held = self.leases.get(offset)
                assert held is not None
                assert held.over
            ended += some
        due = [offset for offset, each in self.plain.items() if not each.over and each.until_us <= self.now_us]
        assert sorted(ended) == sorted(due)
        self.plain.update((offset, self.plain[offset]._replace(over=True)) for offset in due)

    @rule(offsets=some_offsets)
    def look_at_many(self, offsets: Sequence[int]) -> None:
        holders = {self.plain.get(offset) for offset in offsets}
        common = known(self.leases.common(offsets))
        if common is not None:
            assert holders == {common}
        elif len(holders) == 1:
            [holder] = holders
            assert holder is None or holder.over  # which may have been remembered apart

    @invariant()
    def everybody_has_what_they_should(self) -> None:
        assert {at: known(self.leases.get(at)) for at in range(END) if self.leases.get(at)} == self.plain

    @invariant()
    def the_next_end_is_known(self) -> None:
        ends = [each.until_us for each in self.plain.values() if not each.over]
        assert self.leases.next_end_us == min(ends, default=None)

    @invariant()
    def all_of_it_can_be_written_down(self) -> None:
        told = {offset: known(held) for held, offsets in self.leases.frozen() for offset in offsets}
        leaving = {offset: each for offset in self.leaving if (each := told.pop(offset)) is not None}
        assert told == self.plain
        assert {offset: each.number for offset, each in leaving.items()} == {
            offset: each.number for offset, each in self.leaving.items()
        }


LeasesAgainstADict.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_leases_against_a_dict = LeasesAgainstADict.TestCase
