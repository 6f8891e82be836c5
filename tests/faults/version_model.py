"""What publishers of versioned events know, and what must be true of the broker because of it."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from headrace.broker import commit_applier, transactions, version_gate
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.engines import partition, store
from headrace.model.batch import FLAG_VERSIONED, NO_PRODUCER, Producer, parse
from headrace.model.errors import HeadraceError, LogFailed, OutOfOrderSequence, UnexpectedVersion, UnknownProducer
from headrace.model.key_versions import History, version_in
from headrace.model.partitioning import by_key
from headrace.model.request import Request
from headrace.model.requests import Publish, TopicCreate, TransactionBegin, TransactionCommit, TransactionStage
from headrace.storage.settings import LogSettings
from headrace.testing import FaultyDisk, PowerLoss, Unsynced
from headrace.testing.workbench import Workbench

MEMORY = Path("/dev/shm")
SMALL = LogSettings(segment_bytes=4096, checkpoint_bytes=1500, ahead_bytes_max=2048)
KEYS = [b"ann", b"bob", b"eve", b"kim"]
PARTITIONS = 2


@dataclass(eq=False)
class Attempt:
    """Events of one key that somebody wants to append, alone or in a transaction."""

    key: bytes
    values: list[bytes]
    expected: int | None
    producer: Producer = NO_PRODUCER
    fate: str = "asked"
    """`asked`, `acknowledged` or `refused`."""


@dataclass(eq=False)
class Move:
    """Attempts that are committed together."""

    name: str
    parts: list[Attempt] = field(default_factory=list)


class VersionBooks:
    """A broker with a topic that counts versions, on a disk that fails."""

    def __init__(self, seed: int = 0, *, compact: bool = False) -> None:
        self.root = tempfile.mkdtemp(dir=MEMORY if MEMORY.exists() else None)
        self.small = ExitStack()
        # Everything that happens after much has been written happens after little here.
        for module, name, value in (
            (partition, "_CHECKPOINT_WORK", 3),
            (partition, "_INDEXED_TOGETHER", 4),
            (store, "_JOURNAL_SETTINGS", SMALL),
            (store, "_STAGING_SETTINGS", SMALL),
            (transactions, "_TRIM_BYTES", 2000),
            (commit_applier, "_TURN_BYTES", 300),
            (version_gate, "_RELEASED_TOGETHER", 2),
        ):
            self.small.enter_context(patch.object(module, name, value))
        self.disk = FaultyDisk(seed)
        self.compact = compact
        self.now_us = 1_800_000_000_000_000
        self.slow = False
        self.counter = 0
        self.crashes = 0
        self.attempts: list[Attempt] = []
        self.moves: list[Move] = []
        self.by_producer: list[list[Attempt]] = [[], []]
        """By partition: the batches of one producer, by sequence."""
        self.epoch = [0, 0]
        self.seen: dict[tuple[bytes, int], bytes] = {}
        """What was ever read at a version of a key."""
        self.waiting: list[tuple[PendingAnswer[Any], Callable[[Any], None]]] = []
        self.start()
        self.bench.ask(
            TopicCreate(
                "accounts",
                {
                    "key_versions": True,
                    "partitions": PARTITIONS,
                    "segment_bytes": 4096,
                    "compact_by_key": compact,
                },
            )
        )

    def close(self) -> None:
        self.small.close()
        shutil.rmtree(self.root)

    def start(self) -> None:
        """Start the broker; if the power goes off while it starts, start it again."""
        try:
            self._start()
        except (PowerLoss, LogFailed):
            assert self.disk.crashed
            self.disk.power_loss(Unsynced.RANDOM)
            self._start()

    def _start(self) -> None:
        settings = BrokerSettings(journal_bytes=2000, maintenance_seconds=1.0, compact_seconds=1.0)
        self.bench = Workbench(f"{self.root}/data", disk=self.disk, settings=settings, now_us=self.now_us)
        self.bench.syncing_later = self.slow

    # Asking.

    def values(self, count: int) -> list[bytes]:
        self.counter += 1
        return [b"%d.%d" % (self.counter, at) + b"x" * 40 for at in range(count)]

    def publish(self, key: bytes, count: int, expected: int | None, *, numbered: bool = False) -> Attempt:
        """Publish events, perhaps as a producer that can repeat them."""
        attempt = Attempt(key, self.values(count), expected)
        number = by_key(key, PARTITIONS)
        if numbered:
            batches = self.by_producer[number]
            if any(one.fate == "asked" for one in batches):  # one at a time, as each may be refused
                self.repeat(number)
                if any(one.fate == "asked" for one in batches):
                    return attempt
            batches[:] = [one for one in batches if one.fate == "acknowledged"]
            attempt.producer = Producer(100 + number, self.epoch[number], len(batches))
            batches.append(attempt)
        self.attempts.append(attempt)
        self.send(attempt)
        return attempt

    def send(self, attempt: Attempt) -> None:
        batch = self.bench.batch(attempt.values, attempt.producer, keys=[attempt.key] * len(attempt.values))
        request = Publish("accounts", by_key(attempt.key, PARTITIONS), expected_version=attempt.expected)

        def told(answer: Any) -> None:
            if isinstance(answer, UnexpectedVersion):
                assert attempt.expected is not None
                assert answer.details["actual"] != attempt.expected
                # A repeated batch that was appended would have been recognised: this one was not.
                self.learn([attempt], "refused")
            elif isinstance(answer, HeadraceError):
                assert isinstance(answer, LogFailed | UnknownProducer | OutOfOrderSequence), repr(answer)
                assert self.disk.crashed or attempt.producer.id
            else:
                self.learn([attempt], "acknowledged")

        self.ask(request, batch.data, told)

    def repeat(self, number: int) -> None:
        """The producer sends again what it has no answer for, and the last one that it has one for."""
        for attempt in self.by_producer[number][-2:]:
            self.send(attempt)
            self.run()

    def move(self, parts: Sequence[tuple[bytes, int, int | None]]) -> None:
        """Commit events of several keys together."""
        one = Move(f"move-{len(self.moves)}", [Attempt(key, self.values(count), at) for key, count, at in parts])
        self.moves.append(one)
        epoch: list[int] = []
        self.ask(TransactionBegin(one.name, 0), b"", lambda answer: epoch.append(answer.epoch))
        bench = self.bench
        for part in one.parts:
            if epoch and bench is self.bench:
                batch = bench.batch(part.values, keys=[part.key] * len(part.values))
                request = TransactionStage(one.name, epoch[0], "accounts", by_key(part.key, PARTITIONS), part.expected)
                self.ask(request, batch.data, lambda answer: self.assert_fine(answer))
        if not epoch or bench is not self.bench:
            for part in one.parts:
                part.fate = "refused"
            return

        def told(answer: Any) -> None:
            if isinstance(answer, UnexpectedVersion):
                self.learn(one.parts, "refused")
            elif self.assert_fine(answer):
                self.learn(one.parts, "acknowledged")

        self.ask(TransactionCommit(one.name, epoch[0]), b"", told)

    def assert_fine(self, answer: Any) -> bool:
        assert not isinstance(answer, HeadraceError) or (isinstance(answer, LogFailed) and self.disk.crashed), answer
        return not isinstance(answer, HeadraceError)

    def learn(self, attempts: Sequence[Attempt], fate: str) -> None:
        for attempt in attempts:
            assert attempt.fate in ("asked", fate), f"{attempt} is now {fate}"
            attempt.fate = fate

    def ask(self, request: Request[Any], body: Any, told: Callable[[Any], None]) -> None:
        def begin() -> None:
            answer = self.bench.begin(request, body)
            if isinstance(answer, PendingAnswer):
                self.waiting.append((answer, told))
            else:
                told(answer)

        self.attempt(begin)

    def run(self) -> None:
        """Let the broker do all that it has to; then everyone has an answer."""
        bench, waiting = self.bench, self.waiting
        self.attempt(bench.run)
        if bench is not self.bench:
            return
        self.waiting = []
        for answer, told in waiting:
            assert answer.outcome is not None, "there was never an answer"
            told(answer.outcome)

    def attempt(self, action: Callable[[], None]) -> None:
        """Do it; if the power goes off on the way, start again."""
        try:
            action()
        except (PowerLoss, LogFailed):
            assert self.disk.crashed
        if self.disk.crashed:
            self.crash(Unsynced.RANDOM)

    # Ends.

    def crash(self, unsynced: Unsynced) -> None:
        """Lose the power, or only the process."""
        self.crashes += 1
        for answer, told in self.waiting:
            if answer.resolved and not isinstance(answer.outcome, HeadraceError):
                told(answer.outcome)  # it was answered before
        self.waiting = []
        self.disk.power_loss(unsynced)
        self.start()
        for number in range(PARTITIONS):
            # What was not acknowledged may be gone, and the numbers after it: the producer begins anew if so.
            if any(one.fate == "asked" for one in self.by_producer[number]):
                self.repeat(number)

    def restart(self) -> None:
        self.run()
        self.attempt(self.bench.close)
        self.start()

    def compact_now(self) -> None:
        """Let maintenance compact the topic, once all that is there was seen."""
        self.check()
        for _ in range(3):
            self.now_us += 2_000_000
            self.attempt(lambda: self.bench.tick(2.0))
            self.run()

    # What must be true.

    def next_version(self, key: bytes) -> int:
        answer = self.bench.ask(History("accounts", key, messages_max=1))
        return int((answer.answer if isinstance(answer, AnswerWithBody) else answer).next_version)

    def history(self, key: bytes) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        following: int | None = 0
        while following is not None:
            answer = self.bench.ask(History("accounts", key, following, messages_max=7))
            page = answer.answer if isinstance(answer, AnswerWithBody) else answer
            if isinstance(answer, AnswerWithBody):
                columns = parse(memoryview(answer.body)).columns()
                assert all(page.versions[at] < page.versions[at + 1] for at in range(len(page.versions) - 1))
                found.update(zip(page.versions, columns.values, strict=True))  # type: ignore[arg-type]
            following = page.following
        return found

    def check(self) -> None:
        """Compare the histories with the log, with what publishers were told, and with what was read before."""
        self.run()
        disk_fine, histories = self.disk._crash_at, {}
        self.disk._crash_at = None  # looking changes nothing, and is not interrupted
        logged: dict[bytes, list[tuple[int, bytes]]] = {key: [] for key in KEYS}
        for number in range(PARTITIONS):
            for batch in self.bench.batches("accounts", number):
                columns = batch.columns()
                assert not columns.values or batch.flags & FLAG_VERSIONED
                for key, value, headers in zip(columns.keys or (), columns.values, columns.headers or (), strict=True):
                    version = version_in(headers)
                    assert version is not None
                    logged[key].append((version, value))  # type: ignore[index, arg-type]
        for key in KEYS:
            histories[key] = self.history(key)
            assert list(histories[key].items()) == logged[key]
            self._check_key(key, histories[key])
        for attempt in [*self.attempts, *(part for one in self.moves for part in one.parts)]:
            self._check_attempt(attempt, histories[attempt.key])
        for one in self.moves:
            fates = {self._is_there(part, histories[part.key]) for part in one.parts} - {None}
            assert len(fates) <= 1, f"{one} was committed in part"
        self.disk._crash_at = disk_fine

    def _check_key(self, key: bytes, history: dict[int, bytes]) -> None:
        versions = list(history)
        following = self.next_version(key)
        assert following == (versions[-1] + 1 if versions else 0)
        if not self.compact:
            assert versions == list(range(len(versions)))
        for version, value in history.items():
            assert self.seen.setdefault((key, version), value) == value, "a version that was read has changed"
        for (of, version), _ in self.seen.items():
            assert of != key or version < following, "what was read is gone"

    def _is_there(self, attempt: Attempt, history: dict[int, bytes]) -> bool | None:
        """Whether its events are in the log; None if compaction may have removed them."""
        there = [version for version, value in history.items() if value in attempt.values]
        if there:
            return True
        return None if self.compact and any(value in attempt.values for value in self.seen.values()) else False

    def _check_attempt(self, attempt: Attempt, history: dict[int, bytes]) -> None:
        there = [(version, value) for version, value in history.items() if value in attempt.values]
        if not self.compact:
            assert len(there) in (0, len(attempt.values)), "a part of a batch is missing, or is there twice"
        for version, value in there:
            place = attempt.values.index(value)
            assert attempt.fate != "refused", f"{attempt} was refused, and is there"
            if attempt.expected is not None:
                assert version == attempt.expected + place, f"{attempt} has version {version}"
        if attempt.fate == "acknowledged":
            assert self._is_there(attempt, history) is not False, f"{attempt} is lost"
