"""The parts of leased subscriptions that know no broker: each against the simplest thing that does the same."""

from array import array
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.engines.api import ReleaseNote, new_replayed_partition, open_leased_partition
from headrace.engines.leased.disciplines import ordered
from headrace.engines.leased.packing import packed, unpacked
from headrace.engines.leased.runs import Runs
from headrace.engines.leased.statuses import LEASED, READY, RESTING, SETTLED, UNKNOWN, WAITING, FrozenStatuses, Statuses
from headrace.model.errors import InvalidArgument
from headrace.model.leasing import Lease
from headrace.model.subscription import Discipline, SubscriptionSettings, subscription_settings
from headrace.testing.workbench import Workbench

small = st.integers(0, 40)


class RunsAgainstAList(RuleBasedStateMachine):
    """Runs give out what a sorted list would."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs()
        self.plain: list[tuple[int, int]] = []
        self.offset = 0

    @rule(key=small)
    def push(self, key: int) -> None:
        self.runs.push(key, self.offset)
        self.plain.append((key, self.offset))
        self.offset += 1

    @rule(keys=st.lists(small, max_size=12))
    def add(self, keys: list[int]) -> None:
        keys.sort()
        offsets = range(self.offset, self.offset + len(keys))
        self.runs.add(array("q", keys), array("q", offsets))
        self.plain += zip(keys, offsets, strict=True)
        self.offset += len(keys)

    @rule(count=st.integers(1, 3000))
    def add_range(self, count: int) -> None:
        offsets = range(self.offset, self.offset + count)
        self.runs.add(offsets, offsets)
        self.plain += zip(offsets, offsets, strict=True)
        self.offset += count

    @rule(times=st.integers(30, 80), key=small)
    def add_many_small_runs(self, times: int, key: int) -> None:
        for turn in range(times):
            self.add([key + turn % 7, key + turn % 5])

    @rule(count=st.integers(1, 1500), until=st.none() | small)
    def take(self, count: int, until: int | None) -> None:
        keys, offsets = self.runs.take(count, until)
        self.plain.sort()
        expected = [one for one in self.plain if until is None or one[0] <= until][:count]
        assert list(keys) == [key for key, _ in expected]
        taken = list(zip(keys, offsets, strict=True))
        # Among equal keys any order will do.
        left = {key: [] for key in keys}
        for key, offset in self.plain:
            if key in left:
                left[key].append(offset)
        assert all(offset in left[key] for key, offset in taken)
        assert len(set(offsets)) == len(offsets)
        gone = set(taken)
        self.plain = [one for one in self.plain if one not in gone]

    @rule(least=small, width=small)
    def look(self, least: int, width: int) -> None:
        found = list(self.runs.between(least, least + width))
        assert sorted(found) == sorted(one for one in self.plain if least <= one[0] < least + width)
        assert [key for key, _ in found] == sorted(key for key, _ in found)

    @rule()
    def tell_keys(self) -> None:
        parts = self.runs.keys()
        assert all(first <= second for part in parts for first, second in pairwise(part))
        assert sorted(key for part in parts for key in part) == sorted(key for key, _ in self.plain)

    @invariant()
    def knows_how_many(self) -> None:
        assert len(self.runs) == len(self.plain)
        assert self.runs.first_key == min((key for key, _ in self.plain), default=None)


RunsAgainstAList.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
test_runs_against_a_list = RunsAgainstAList.TestCase

near = st.integers(0, 3 * 4096)


class StatusesAgainstADict(RuleBasedStateMachine):
    """Statuses tell what a dict would."""

    def __init__(self) -> None:
        super().__init__()
        self.start = 4000
        self.statuses = Statuses(self.start)
        self.plain: dict[int, int] = dict.fromkeys(range(self.start), SETTLED)
        self.failed: dict[int, int] = {}
        self.frozen: list[tuple[Statuses, FrozenStatuses, dict[int, tuple[bytes, bytes]]]] = []

    @property
    def end(self) -> int:
        return len(self.plain)

    @rule(count=st.integers(1, 6000), status=st.sampled_from([READY, WAITING, SETTLED]))
    def begin(self, count: int, status: int) -> None:
        if self.end > 5 * 4096:
            return
        end = self.end
        self.statuses.begin(end, end + count, status)
        self.plain.update(dict.fromkeys(range(end, end + count), status))

    @rule(share=st.floats(0, 1), count=st.integers(1, 5000), status=st.sampled_from([READY, LEASED, RESTING, SETTLED]))
    def change_range(self, share: float, count: int, status: int) -> None:
        start = int(share * self.end)
        self.change(range(start, min(start + count, self.end)), status)

    @rule(shares=st.lists(st.floats(0, 0.999)), status=st.sampled_from([READY, LEASED, WAITING, SETTLED]))
    def change_some(self, shares: list[float], status: int) -> None:
        self.change(list({int(share * self.end) for share in shares}), status)

    def change(self, offsets: list[int] | range, status: int) -> None:
        self.statuses.change(offsets, status)
        for offset in offsets:
            if self.plain[offset] != SETTLED:
                self.plain[offset] = status

    @rule(shares=st.lists(st.floats(0, 0.999), max_size=5))
    def fail(self, shares: list[float]) -> None:
        offsets = [at for share in shares if self.plain[at := int(share * self.end)] != SETTLED]
        self.statuses.fail(offsets)
        for offset in offsets:
            self.failed[offset] = self.failed.get(offset, 0) + 1

    @rule()
    def save_and_load(self) -> None:
        self.statuses = reloaded(self.statuses)
        self.mark_again()

    @rule()
    def freeze(self) -> None:
        """What was, whatever becomes of the messages later."""
        kept = {
            number: (bytes(chunk), bytes(self.statuses._failed.get(number, b"")))
            for number, chunk in self.statuses._chunks.items()
        }
        self.frozen.append((self.statuses, self.statuses.frozen(), kept))

    @invariant()
    def what_was_frozen_stays(self) -> None:
        for statuses, frozen, kept in self.frozen:
            now = {
                number: (bytes(chunk), bytes(frozen.failed.get(number, b""))) for number, chunk in frozen.chunks.items()
            }
            assert now == kept
            for number, (chunk, failed) in kept.items():
                if statuses.is_unchanged(number, frozen):
                    assert statuses._chunks[number] == chunk
                    assert bytes(statuses._failed.get(number, b"")) == failed

    def mark_again(self) -> None:
        """A snapshot keeps what is settled; the rest comes from elsewhere."""
        for status in (READY, LEASED, RESTING, WAITING):
            self.statuses.change([at for at, each in self.plain.items() if each == status], status)

    @invariant()
    def tells_the_same(self) -> None:
        statuses = self.statuses
        assert statuses.end == self.end
        for status in (READY, LEASED, RESTING, WAITING):
            having = [offset for offset, each in self.plain.items() if each == status]
            assert list(statuses.with_status(status)) == having
            assert statuses.counts[status] == len(having)
            assert statuses.only(having, status) == having
        unsettled = [offset for offset, each in self.plain.items() if each != SETTLED]
        assert statuses.floor == min(unsettled, default=self.end)
        ranges = list(statuses.unsettled())
        assert all(any(low <= offset < high for low, high in ranges) for offset in unsettled)
        settled = statuses.settled_now()
        assert [offset for offset in self.plain if not settled(offset)] == unsettled
        assert statuses[self.end] == UNKNOWN
        some = [offset for offset in self.failed if self.plain[offset] != SETTLED]
        assert statuses.failures(some) == ([self.failed[offset] for offset in some] if some else [])


def reloaded(statuses: Statuses) -> Statuses:
    again = Statuses(0)
    again.load(statuses.end)
    frozen = statuses.frozen()
    for number in frozen.chunks:
        again.load_chunk(number, *frozen.saved(number))
    return again


StatusesAgainstADict.TestCase.settings = settings(max_examples=40, stateful_step_count=15)
test_statuses_against_a_dict = StatusesAgainstADict.TestCase


@given(st.lists(st.integers(0, 1 << 46), min_size=1))
def test_offsets_survive_packing(offsets: list[int]) -> None:
    assert list(unpacked(packed(offsets))) == offsets


@given(entries=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5000)), unique=True, max_size=4000), data=st.data())
@settings(max_examples=30, deadline=None)
def test_equal_keys_are_listed_in_the_order_of_offsets(entries: list[tuple[int, int]], data: st.DataObject) -> None:
    runs = Runs()
    size = data.draw(st.integers(1, 60))
    for start in range(0, len(entries), size):
        some = entries[start : start + size]
        if data.draw(st.booleans()):
            some.sort()
            runs.add(array("q", [key for key, _ in some]), array("q", [offset for _, offset in some]))
        else:
            for key, offset in some:
                runs.push(key, offset)
    assert list(runs.between(0, 10)) == sorted(entries)


def test_runs_that_become_one_keep_the_order_of_offsets() -> None:
    runs = Runs()
    for offset in reversed(range(100)):
        runs.add(array("q", [7]), array("q", [offset]))
    assert list(runs.between(0, 10)) == [(7, offset) for offset in range(100)]


def test_offsets_that_follow_each_other_take_few_bytes() -> None:
    assert len(packed(range(1000, 2000))) == len(packed([5])) == len(packed(list(range(7, 9000))))


@given(st.lists(st.tuples(st.none() | st.integers(-5, 5), st.integers(0, 9)), min_size=1))
def test_every_discipline_has_its_order(messages: list[tuple[int | None, int]]) -> None:
    offsets = range(100, 100 + len(messages))
    priorities, times = [priority for priority, _ in messages], [time for _, time in messages]
    rank = dict(zip(offsets, [-(priority or 0) for priority in priorities], strict=True))
    time = dict(zip(offsets, times, strict=True))
    expected = {
        Discipline.FIFO: list(offsets),
        Discipline.LIFO: list(reversed(offsets)),
        Discipline.PRIORITY: sorted(offsets, key=lambda offset: (rank[offset], offset)),
        Discipline.DEADLINE: sorted(offsets, key=lambda offset: (time[offset], offset)),
    }
    for discipline, right in expected.items():
        for given_offsets in (offsets, list(offsets)):
            keys, found = ordered(discipline, given_offsets, priorities, times)
            assert list(found) == right
            assert list(keys) == sorted(keys)


def test_retries_grow_as_the_policy_says() -> None:
    def delays(**given: object) -> list[float]:
        policy = subscription_settings({"retry_jitter": 0.0, **given})
        return [policy.retry_us(times, 0.5) / 1e6 for times in (1, 2, 3, 10)]

    assert delays(retry="fixed", retry_seconds=5) == [5, 5, 5, 5]
    assert delays(retry="linear", retry_seconds=5) == [5, 10, 15, 50]
    assert delays(retry="exponential", retry_seconds=1, retry_seconds_max=60) == [1, 2, 4, 60]
    jittered = SubscriptionSettings(retry_seconds=10, retry_jitter=0.5)
    assert [jittered.retry_us(1, luck) for luck in (0, 0.5, 1)] == [5_000_000, 10_000_000, 15_000_000]
    bounded = SubscriptionSettings(retry_seconds=10, retry_seconds_max=12, retry_jitter=0.5)
    assert [bounded.retry_us(1, luck) for luck in (0, 0.5, 1)] == [5_000_000, 10_000_000, 12_000_000]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"discipline": "random"}, "discipline"),
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"deliveries_max": 256}, "deliveries_max"),
        ({"retry_seconds": 10, "retry_seconds_max": 1}, "retry_seconds"),
        ({"retry_jitter": 2}, "retry_jitter"),
        ({"dead_letter_topic": "no*stars"}, r"no\*stars"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_wrong_settings_are_refused_with_a_word_on_which(given: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        subscription_settings(given)


# The journal's facts come first, then the log.


def test_what_was_replayed_is_taken_over_by_the_live_index() -> None:
    bench = Workbench()
    bench.publish("jobs", [b"%d" % number for number in range(6)])
    partition = bench.broker._topics.active(bench.broker._topics.get("jobs"), 0).partition
    replayed = new_replayed_partition(1)
    replayed.apply_leased(7, "ann", 5000, [1, 2, 3])
    replayed.apply_settled([1])
    replayed.apply_returned([2], [9000], True, ReleaseNote(10, "ann", "tired"), {2: b"half"}, 10)
    live = open_leased_partition(replayed, partition, "default", SubscriptionSettings(), None, {})
    for _ in live.load(6, 20):
        pass
    assert [live.status(offset) for offset in range(6)] == ["", "", "waiting", "leased", "ready", "ready"]
    assert live.message_state(2) == ("waiting", 9000, 1, 1, "", 0, "tired")
    assert live.message_state(3)[4:6] == ("ann", 5000)
    assert (live.floor, live.end, live.unsettled_count) == (2, 6, 4)
    live.apply_settled([3])  # a fact that comes later reaches the live one
    assert live.status(3) == ""


def test_a_snapshot_of_the_live_index_is_replayed_as_it_was() -> None:
    bench = Workbench()
    bench.publish("jobs", [b"%d" % number for number in range(6)])
    bench.ask(Lease("jobs", messages_max=2))
    [subscription] = bench.broker._subscriptions
    live = subscription.indexes[0]
    frozen, again = live.frozen(), new_replayed_partition(0)
    again.begin_snapshot(frozen.end)
    for chunks in frozen.chunks():
        again.load_chunks(chunks)
    for rest in frozen.rest():
        again.load_rest(rest)
    assert (again.end, again.floor) == (live.end, live.floor)
    reopened = open_leased_partition(
        again, subscription.topic.active_partitions[0].partition, "default", SubscriptionSettings(), None, {}
    )
    for _ in reopened.load(6, bench.now_us):
        pass
    assert [reopened.message_state(at) for at in range(6)] == [live.message_state(at) for at in range(6)]
