"""What the model of a broker remembers, as whoever asked sees it, and what must be true of the broker because of it."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from headrace.broker import commit_applier, reservation, transactions
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.engines import partition, store
from headrace.model.batch import Producer
from headrace.model.errors import (
    Busy,
    DiskFull,
    HeadraceError,
    InternalError,
    InvalidArgument,
    LogFailed,
    OutOfOrderSequence,
    TransactionFenced,
    TransactionNotFound,
    UnknownProducer,
)
from headrace.model.request import Request
from headrace.model.requests import (
    GroupDescribe,
    PartitionOffset,
    Publish,
    TopicDescribe,
    TopicList,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.model.topic import TopicSettings
from headrace.storage.settings import LogSettings
from headrace.testing import FaultyDisk, PowerLoss, Unsynced
from headrace.testing.workbench import Workbench

MEMORY = Path("/dev/shm")
SMALL = LogSettings(segment_bytes=4096, checkpoint_bytes=1500, ahead_bytes_max=2048)
NAMES = ["plain", "queue", "written"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"partitions": 2},
    "queue": {"validity": "until_consumed"},
    "written": {"durability": "written"},
}
PRODUCERS = [100, 101, 102]
TRANSACTIONS = ["nightly", "hourly"]
GROUPS = ["readers", "writers"]
IN_FLIGHT = 4
ANY = st.integers(0, 11)

_MISSING = (OutOfOrderSequence, UnknownProducer)
Errors = tuple[type[HeadraceError], ...]

Spot = tuple["Topic", int]
"""A topic and a partition."""


@dataclass(eq=False)
class Topic:
    """A topic that may be there; one that is made again is another one."""

    name: str
    settings: dict[str, Any]
    sure: bool = False
    """Whether it must be there after a power loss."""
    id: int = 0
    seen: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """What was ever read, by partition and offset."""
    named: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """The same, with what a power loss has taken back."""

    @property
    def partitions(self) -> int:
        return self.settings.get("partitions", 1)

    @property
    def written(self) -> bool:
        """Whether a power loss may take messages back."""
        return "durability" in self.settings


@dataclass(eq=False)
class Sent:
    """A batch of a producer, or of nobody."""

    spot: Spot
    producer: Producer
    values: list[bytes]
    base: int | None = None
    """Where it is, once it is acknowledged."""


@dataclass(eq=False)
class Transaction:
    """A transaction, from its beginning to its end."""

    name: str
    epoch: int
    sequence: int
    stages: dict[int, tuple[Spot, list[bytes]]] = field(default_factory=dict)
    chosen: list[int] | None = None
    move: tuple[str, Spot, int] | None = None
    outcome: str = "open"
    """open, asked, committed, or gone."""
    shared: bool = False
    """It was joined, and outlives the broker's end."""
    doubtful: bool = False
    """A power loss may have taken batches back that were staged."""


class Books(RuleBasedStateMachine):
    """A broker, what was asked of it, and what must be true of it at any time."""

    @initialize(seed=st.integers(0, 2**32), journal_bytes=st.sampled_from([300, 2000, 1 << 20]), slow=st.booleans())
    def begin(self, seed: int, journal_bytes: int, slow: bool) -> None:
        self.root = tempfile.mkdtemp(dir=MEMORY if MEMORY.exists() else None)
        self.small = ExitStack()
        # Everything that happens after much has been written happens after little here.
        for module, name, value in (
            (partition, "_CHECKPOINT_WORK", 3),
            (store, "_JOURNAL_SETTINGS", SMALL),
            (store, "_STAGING_SETTINGS", SMALL),
            (transactions, "_TRIM_BYTES", 2000),
            (commit_applier, "_TURN_BYTES", 800),
            (reservation, "BLOCK_MIN", 4),
            (reservation, "BLOCK_MAX", 16),
        ):
            self.small.enter_context(patch.object(module, name, value))
        self.disk = FaultyDisk(seed)
        self.settings = BrokerSettings(
            journal_bytes=journal_bytes, maintenance_seconds=1.0, topic=TopicSettings(segment_bytes=4096)
        )
        self.now_us = 1_800_000_000_000_000
        self.slow = slow
        self.failed = False  # whether a sync has failed, or will
        self.counter = 0
        self.topics: dict[str, Topic] = {}
        self.ids: set[int] = set()
        self.doubtful: set[str] = set()  # topics that are being deleted
        self.waiting: list[tuple[PendingAnswer[Any], Callable[[Any], None]]] = []
        self.batches: dict[tuple[int, Topic, int], list[Sent]] = {}
        self.epochs: dict[tuple[int, Topic, int], int] = {}
        self.loose: list[Sent] = []
        self.open: dict[str, Transaction] = {}
        self.transactions: list[Transaction] = []
        self.positions: dict[tuple[str, Topic, int], list[tuple[int, Transaction | None]]] = {}
        self.start()

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.small.close()
            shutil.rmtree(self.root)

    def start(self) -> None:
        self.bench = Workbench(f"{self.root}/data", disk=self.disk, settings=self.settings, now_us=self.now_us)
        self.bench.syncing_later = self.slow

    # What is asked, and what becomes of it.

    def ask(
        self, request: Request[Any], told: Callable[[Any], None], body: bytes | bytearray = b"", may_be: Errors = ()
    ) -> None:
        """Ask, and note who is to be told of success, and which errors are none of the broker's."""

        def tell(answer: Any) -> None:
            if not isinstance(answer, HeadraceError):
                told(answer)
            else:
                assert self.in_trouble(answer) or isinstance(answer, may_be), repr(answer)

        def begin() -> Any:
            answer = self.bench.begin(request, body)
            if isinstance(answer, PendingAnswer):
                self.waiting.append((answer, tell))
                return None
            return answer

        answer = self.attempt(begin)
        if answer is not None:
            tell(answer)

    def answered(self, request: Request[Any], body: bytes | bytearray = b"") -> Any:
        """The answer or the error; None if the power went off."""

        def ask() -> Any:
            answer = self.bench.begin(request, body)
            self.bench.run()
            return answer.outcome if isinstance(answer, PendingAnswer) else answer

        self.run()
        return self.attempt(ask)

    def run(self) -> None:
        """Let the broker do all that it has to; then everyone has an answer."""
        bench, waiting = self.bench, self.waiting
        self.attempt(bench.run)
        if bench is not self.bench:
            return
        self.waiting = []
        for later, told in waiting:
            assert later.outcome is not None, "there was never an answer"
            told(later.outcome)
        if self.disk.crashed:
            self.lost_power()

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Do it; if the power goes off on the way, start again and return None."""
        try:
            answer = action()
        except (PowerLoss, LogFailed):
            assert self.disk.crashed
            self.lost_power()
            return None
        if self.disk.crashed:
            self.lost_power()
            return None
        return answer

    def in_trouble(self, answer: object) -> bool:
        """Whether it is an error that the disk explains, or no answer at all as the power went off."""
        if isinstance(answer, DiskFull):
            return self.disk.capacity_bytes is not None
        failed = self.disk.crashed or self.failed
        return answer is None or (isinstance(answer, LogFailed | InternalError) and failed)

    def send(self, batch: Sent) -> None:
        topic, number = batch.spot
        if self.topics.get(topic.name) is not topic:
            return

        def acknowledged(answer: Any) -> None:
            if answer.base_offset >= 0:
                assert batch.base in (None, answer.base_offset)
                batch.base = answer.base_offset
            else:
                assert batch.base is not None
            topic.sure = topic.sure or not topic.written

        body = self.bench.batch(batch.values, batch.producer).data
        earlier = self.batches.get((batch.producer.id, *batch.spot), [])[: batch.producer.sequence]
        missing = any(other.base is None for other in earlier)
        self.ask(Publish(topic.name, number), acknowledged, body, _MISSING if missing else ())

    def begin_transaction(self, name: str, shared: bool) -> None:
        """Begin one; an open one of the same name is over, unless this one and that one are shared."""
        before = self.open.get(name)

        def begun(answer: Any) -> None:
            assert not answer.committed
            joined = [one for one in self.transactions if one.epoch == answer.epoch]
            if joined:
                # One is open that was to be aborted: the disk was full, or a power loss has brought it back.
                assert shared
                assert joined[0].shared
                assert joined[0].outcome in ("open", "gone")
                joined[0].doubtful = joined[0].doubtful or joined[0].outcome == "gone"
                joined[0].outcome = "open"
                self.open[name] = joined[0]
                return
            assert not (shared and before is not None and before.shared), "it was open, and was not joined"
            if before is not None:
                self.end(before, "gone")
            assert all(answer.epoch > other.epoch for other in self.transactions)
            self.open[name] = Transaction(name, answer.epoch, answer.sequence, shared=shared)
            self.transactions.append(self.open[name])

        self.ask(TransactionBegin(name, timeout_ms=100_000, join=shared), begun, may_be=(Busy,))

    def stage(self, name: str, spot: Spot, values: list[bytes]) -> None:
        one = self.open.get(name)
        if one is not None and one.outcome == "open":

            def staged(answer: Any) -> None:
                one.stages[answer.stage] = spot, values

            body = self.bench.batch(values).data
            self.ask(TransactionStage(name, one.epoch, spot[0].name, spot[1]), staged, body)

    def commit(self, one: Transaction, some: bool, move: tuple[int, float] | None) -> None:
        """Commit all that was staged or some of it, and perhaps a position of a group."""
        stages = [stage for stage, ((at, _), _) in one.stages.items() if self.topics.get(at.name) is at]
        one.chosen, one.move, one.outcome = stages[:: 2 if some else 1], None, "asked"
        spot = self.known(move[0]) if move is not None else None
        if move is not None and spot is not None:
            one.move = "writers", spot, self.offset_in(spot, move[1])
            self.moves("writers", spot).append((one.move[2], one))
        self.ask_to_commit(one)

    def ask_to_commit(self, one: Transaction) -> None:
        places = []
        if one.move is not None:
            group, (topic, number), offset = one.move
            places = [PartitionOffset(topic.name, number, offset)]

        def committed(answer: Any) -> None:
            assert answer.sequence == one.sequence
            self.end(one, "committed")

        group = one.move[0] if one.move is not None else ""
        may_be = (InvalidArgument,) if one.doubtful else ()
        self.ask(TransactionCommit(one.name, one.epoch, one.chosen, group, "", places), committed, may_be=may_be)

    def take_back(self, one: Transaction) -> None:
        if one.move is not None:
            moves = self.moves(one.move[0], one.move[1])
            moves[:] = [move for move in moves if move[1] is not one]

    def end(self, one: Transaction, outcome: str) -> None:
        one.outcome = outcome
        if self.open.get(one.name) is one:
            del self.open[one.name]
        if outcome == "gone":
            self.take_back(one)
            return
        for (topic, _), _ in (one.stages[stage] for stage in one.chosen or ()):
            topic.sure = True
        if one.move is not None:
            one.move[1][0].sure = True
            moves = self.moves(one.move[0], one.move[1])
            moves[:] = moves[next((at for at, move in enumerate(moves) if move[1] is one), 0) :]

    def spot(self, which: int) -> Spot:
        """A partition; its topic makes itself if there is none."""
        name = NAMES[which % 3]
        topic = self.topics.setdefault(name, Topic(name, {}))
        return topic, which // 3 % topic.partitions

    def known(self, which: int) -> Spot | None:
        """A partition of a topic that is there for certain."""
        topic = self.topics.get(NAMES[which % 3])
        if topic is None or not topic.sure or topic.name in self.doubtful:
            return None
        return topic, which // 3 % topic.partitions

    def offset_in(self, spot: Spot, share: float) -> int:
        """A position that nobody has taken back: a share of what was read, at or behind all that was committed."""
        topic, number = spot
        taken = [offset for group in GROUPS for offset, _ in self.moves(group, spot)]
        last = max(topic.seen.get(number, {}), default=-1) + 1 if not topic.written else 0
        return max([int(last * share), *taken])

    def moves(self, group: str, spot: Spot) -> list[tuple[int, Transaction | None]]:
        """Where a group may be: its last position that was acknowledged, and those asked for since."""
        return self.positions.setdefault((group, *spot), [(0, None)])

    def values(self, count: int) -> list[bytes]:
        """Values that nobody else has."""
        self.counter += 1
        return [b"%d.%d of %d " % (self.counter, at, count) + b"." * (self.counter % 300) for at in range(count)]

    def learn(self, topic: Topic, answer: Any) -> None:
        topic.sure = True
        if not topic.id:
            assert answer.id not in self.ids, "an id was given out twice"
            self.ids.add(answer.id)
            topic.id = answer.id
        assert topic.id == answer.id

    def forget(self, name: str) -> None:
        topic = self.topics.pop(name)
        self.doubtful.discard(name)
        self.loose = [batch for batch in self.loose if batch.spot[0] is not topic]
        for table in (self.batches, self.epochs, self.positions):
            for key in [key for key in table if key[1] is topic]:
                del table[key]  # type: ignore[attr-defined]

    # After the end of a broker.

    def lost_power(self) -> None:
        self.disk.power_loss(Unsynced.RANDOM)
        self.recover(power_lost=True)

    def recover(self, *, power_lost: bool) -> None:
        """Start the broker again, and find out what became of all that was asked and not answered."""
        self.settle_known()
        self.waiting = []
        self.mend_the_disk()
        safe = not power_lost and not self.failed
        self.failed = False
        self.disk.crash_after(10**9)
        self.now_us = self.bench.now_us + 1
        self.start()
        there = {info.topic for info in self.bench.ask(TopicList()).topics}
        for topic in list(self.topics.values()):
            if topic.name not in there:
                assert topic.name in self.doubtful or not topic.sure, f"{topic.name} is gone"
                self.forget(topic.name)
        self.doubtful.clear()
        for one in [one for one in self.transactions if one.outcome in ("open", "asked")]:
            if one.shared:
                self.find_again(one, safe)
            else:
                self.find_out(one, safe)
        if power_lost:
            for topic in [topic for topic in self.topics.values() if topic.written]:
                self.begin_anew(topic)
        for topic in self.topics.values():
            self.learn(topic, self.bench.ask(TopicDescribe(topic.name)))

    def mend_the_disk(self) -> None:
        self.disk.capacity_bytes = None
        self.disk._sync_failures.clear()

    def settle_known(self) -> None:
        """Answers that were given before the end count."""
        for later, told in self.waiting:
            if later.outcome is not None and not isinstance(later.outcome, HeadraceError):
                told(later.outcome)

    def find_out(self, one: Transaction, safe: bool) -> None:
        try:
            answer = self.bench.ask(TransactionCommit(one.name, one.epoch))
            assert answer.repeated
            assert one.outcome == "asked"
            self.end(one, "committed")
        except TransactionNotFound:
            self.end(one, "gone")
        except TransactionFenced:
            assert not safe  # a power loss may bring back a shared one that this one had replaced
            self.end(one, "gone")

    def find_again(self, one: Transaction, safe: bool) -> None:
        """A shared transaction is still open, with all that was staged unless the power was lost."""
        answer = self.bench.ask(TransactionBegin(one.name, one.sequence, 100_000, join=True))
        one.doubtful = one.doubtful or not safe
        if answer.committed:
            assert one.outcome == "asked"
            self.end(one, "committed")
        elif answer.epoch != one.epoch:
            assert not safe, "a shared transaction is gone"
            self.end(one, "gone")
            self.bench.ask(TransactionAbort(one.name, answer.epoch))

    def begin_anew(self, topic: Topic) -> None:
        """A power loss may take written messages back: their producers go on with another epoch."""
        topic.seen.clear()
        self.loose = [batch for batch in self.loose if batch.spot[0] is not topic]
        for key in [key for key in self.batches if key[1] is topic]:
            self.batches[key] = []
            self.epochs[key] += 1

    # What must always be true.

    @invariant()
    def everything_is_as_it_should_be(self) -> None:
        if not hasattr(self, "bench") or self.disk.crashed or self.failed or self.disk.capacity_bytes is not None:
            return
        bench = None
        while bench is not self.bench:  # the power may go when a partition is opened, and with it what was read before
            bench = self.bench
            for topic in list(self.topics.values()):
                for number in range(topic.partitions):
                    if topic.sure and self.topics.get(topic.name) is topic:
                        self.read(topic, number)
        if not self.waiting and self.attempt(lambda: self.bench.run() or True):
            self.check_batches()
            self.check_transactions()
            self.check_positions()

    def read(self, topic: Topic, number: int) -> None:
        """What was read once can be read again, in the same place; only what every group has passed may go."""
        seen = topic.seen.setdefault(number, {})
        info = self.attempt(lambda: self.bench.begin(TopicDescribe(topic.name)).partitions[number])
        found = info and self.attempt(lambda: list(self.messages(topic, number, info.first_offset)))
        if found is None:
            return  # the power went off
        first = info.first_offset
        passed = [max(offset for offset, _ in self.moves(group, (topic, number))) for group in GROUPS]
        assert first <= max(passed), "messages went that somebody needs"
        now = dict(found)
        assert len(now) == len(found)
        named = topic.named.setdefault(number, {})
        assert all(named.setdefault(at, value) == value for at, value in found), "an offset names another message"
        assert {at: value for at, value in seen.items() if at >= first}.items() <= now.items()
        seen.update(now)
        assert len(set(seen.values())) == len(seen), "a message is there twice"

    def messages(self, topic: Topic, number: int, first: int) -> Iterator[tuple[int, bytes]]:
        for batch in self.bench.batches(topic.name, number, first):
            for message in batch.messages():
                yield message.offset, message.value or b""

    def check_batches(self) -> None:
        """What was acknowledged is where it was said to be; of a producer's batches there is a beginning."""
        for batches in self.batches.values():
            there = [self.is_there(batch) for batch in batches]
            assert there == sorted(there, reverse=True), "a batch is missing before another"
        for batch in self.loose:
            self.is_there(batch)

    def is_there(self, batch: Sent) -> bool:
        topic, number = batch.spot
        found = self.find(topic, number, batch.values)
        if batch.base is not None:
            assert found == batch.base
        return found is not None

    def find(self, topic: Topic, number: int, values: list[bytes]) -> int | None:
        """Where these messages are, all of them one after the other; None when there is none of them."""
        seen = topic.seen.get(number, {})
        places = [at for at, value in seen.items() if value in set(values)]
        if not places:
            return None
        assert [seen.get(min(places) + at) for at in range(len(values))] == values, "only a part is there"
        return min(places)

    def check_transactions(self) -> None:
        """All or nothing, in the order in which it was staged."""
        for one in self.transactions:
            last: dict[Spot, int] = {}
            for stage, (spot, values) in one.stages.items():
                topic = spot[0]
                if self.topics.get(topic.name) is not topic:
                    continue
                found = self.find(*spot, values)
                wanted = one.outcome == "committed" and stage in (one.chosen or ())
                assert (found is not None) == wanted, f"{one.name} is {one.outcome}, but not all of it"
                if found is not None:
                    assert found > last.get(spot, -1)
                    last[spot] = found

    def check_positions(self) -> None:
        """A group is where it was put last, by a commit or by a transaction that counts."""
        for group in GROUPS:
            spots = {key[1:]: moves for key, moves in self.positions.items() if key[0] == group}
            places = getattr(self.bench.begin(GroupDescribe(group)), "places", [])
            found = {(place.topic, place.partition): place.offset for place in places}
            for (topic, number), moves in spots.items():
                at, seen = found.get((topic.name, number), 0), topic.seen.get(number, {})
                # Among lost messages it goes on behind them.
                skipped = [offset for offset, _ in moves if topic.written and not seen.keys() & set(range(offset, at))]
                assert at in [*(offset for offset, _ in moves), *(at for offset in skipped if offset < at)]
