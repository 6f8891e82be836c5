"""The gate of a partition with key versions: publishes wait until the versions of all keys are known."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.broker.slices import Steps, in_slices
from headrace.engines.api import KeyIndex, Partition
from headrace.model.batch import Batch
from headrace.model.errors import BatchTooLarge, Busy, HeadraceError, InvalidArgument
from headrace.model.key_versions import VERSION_HEADER_BYTES, VERSION_MAX
from headrace.model.limits import BATCH_BYTES_MAX, VERSIONED_BATCH_MESSAGES_MAX, WAITING_PUBLISH_BYTES_MAX
from headrace.model.partitioning import by_key
from headrace.model.requests import Publish, Published

_RELEASED_TOGETHER = 100
"""Waiting batches that are published per loop turn."""
Publishing = Callable[[Publish, Batch, int], Published | PendingAnswer[Published]]


class _WaitingPublish(NamedTuple):
    """A batch that waits at the gate."""

    request: Publish
    batch: Batch
    now_us: int
    answer: PendingAnswer[Published]


class VersionGate:
    """Loads the index of a partition's keys, and holds publishes back until it is there and no commit is under way.

    A committed transaction is appended some time after it was checked. Until then its keys are reserved: other commits
    are checked as if its messages were there, and publishes wait, so that none comes between.
    """

    def __init__(self, partition: Partition, ports: Ports, publish: Publishing) -> None:
        self._partition = partition
        self._ports = ports
        self._publish = publish
        self._waiting: deque[_WaitingPublish] = deque()
        self._waiting_bytes = 0
        self._listeners: list[Callable[[HeadraceError | None], None]] = []
        self._holds = 0
        """Commits to the partition that are recorded and not appended yet."""
        self._unknown_holds = 0
        """Those among them from before the start, of whose keys nothing is known."""
        self._unknown_listeners: list[Callable[[HeadraceError | None], None]] = []
        self._reserved: dict[bytes, int] = {}
        """How many messages of a key these commits will append."""
        self._loading = self._releasing = False
        self._failure: HeadraceError | None = None
        """Why nothing can be published: the journal failed, and nobody knows whether a commit counts."""
        self._latest_us = 0
        self.load()

    @property
    def is_open(self) -> bool:
        """Whether a publish can be decided now."""
        loaded = self._partition.key_index is not None
        return loaded and not self._holds and (self._releasing or not self._waiting) and self._failure is None

    @property
    def is_loaded(self) -> bool:
        """Whether the index is there."""
        return self._partition.key_index is not None

    @property
    def idle(self) -> bool:
        """Whether no publish waits."""
        return not self._waiting

    @property
    def index(self) -> KeyIndex:
        """The index, which is loaded."""
        index = self._partition.key_index
        assert index is not None
        return index

    def load(self) -> None:
        """Load the index in slices, or load it again without messages that compaction removed."""
        if not self._loading:
            self._loading = True
            in_slices(self._ports, self._steps()).then(self._loaded)

    def _steps(self) -> Steps:
        yield from self._partition.load_key_index()

    def _loaded(self, outcome: object) -> None:
        self._loading = False
        error = outcome if isinstance(outcome, HeadraceError) and not self.is_loaded else None
        listeners, self._listeners = self._listeners, []
        for tell in listeners:
            tell(error)
        if error is None:
            self._release()
        else:
            self.fail_waiting(error)

    def when_loaded(self, tell: Callable[[HeadraceError | None], None]) -> None:
        """Call back when the index is there, or with the error; a failed load is tried again."""
        if self.is_loaded:
            tell(None)
            return
        self._listeners.append(tell)
        self.load()

    def when_known(self, tell: Callable[[HeadraceError | None], None]) -> None:
        """Call back when `next_version` can be asked: all keys are read, and commits from before the start applied."""

        def loaded(error: HeadraceError | None) -> None:
            if error is None and self._unknown_holds:
                self._unknown_listeners.append(tell)
            else:
                tell(error)

        self.when_loaded(loaded)

    @property
    def is_known(self) -> bool:
        """Whether `next_version` can be asked."""
        return self.is_loaded and not self._unknown_holds

    # Publishing.

    def check_batch(self, batch: Batch, topic: str, number: int, partitions: int, expected: int | None) -> None:
        """Refuse a batch whose messages could not be numbered, or that cannot have an expected version."""
        if batch.count > VERSIONED_BATCH_MESSAGES_MAX:
            raise BatchTooLarge(
                f"a batch for {topic}, a topic with key_versions, has at most {VERSIONED_BATCH_MESSAGES_MAX} messages, "
                f"not {batch.count}; use a smaller batch_count"
            )
        if batch.raw_bytes + VERSION_HEADER_BYTES * batch.count > BATCH_BYTES_MAX:
            raise BatchTooLarge(
                f"a batch for {topic} leaves no room for the versions of its messages; use a smaller one"
            )
        keys = batch.columns().keys
        distinct = set(keys or (None,))
        if expected is not None:
            if not 0 <= expected <= VERSION_MAX:
                raise InvalidArgument(f"expected_version is 0 to {VERSION_MAX}, not {expected}")
            if len(distinct) > 1 or None in distinct:
                raise InvalidArgument("expected_version is about one key: all messages of the batch must have the same")
        for key in distinct if partitions > 1 else ():
            if key is not None and by_key(key, partitions) != number:
                raise InvalidArgument(
                    f"in {topic}, a topic with key_versions, messages of a key go to the partition of the key, which "
                    f"is {by_key(key, partitions)}, not {number}; leave the partition out, or use no partitioner"
                )

    def enqueue(self, request: Publish, batch: Batch, now_us: int) -> PendingAnswer[Published]:
        """Let a batch wait until the gate opens."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
        if self._waiting_bytes + batch.length > WAITING_PUBLISH_BYTES_MAX:
            raise Busy("the keys of the partition are being read, and too many batches wait for that; try again")
        batch.data = bytearray(batch.data)  # what was received is written over soon
        answer: PendingAnswer[Published] = PendingAnswer()
        self._waiting.append(_WaitingPublish(request, batch, now_us, answer))
        self._waiting_bytes += batch.length
        if not self.is_loaded:
            self.load()
        return answer

    def note_time(self, now_us: int) -> None:
        """Messages that waited are appended at this time at the earliest."""
        self._latest_us = max(self._latest_us, now_us)

    def _release(self) -> None:
        """Publish what waits, in order, as far as the gate is open."""
        if self._releasing:
            return
        self._releasing = True
        try:
            for _ in range(_RELEASED_TOGETHER):
                if not self._waiting or not self.is_open:
                    return
                request, batch, now_us, answer = self._waiting.popleft()
                self._waiting_bytes -= batch.length
                if answer.resolved:
                    continue  # it was cancelled
                self.note_time(now_us)
                try:
                    outcome = self._publish(request, batch, self._latest_us)
                except HeadraceError as error:
                    answer.resolve(error)
                else:
                    if isinstance(outcome, PendingAnswer):
                        outcome.then(answer.resolve)
                    else:
                        answer.resolve(outcome)
        finally:
            self._releasing = False
        self._ports.call_at_turn_end(self._release)

    def fail_waiting(self, error: HeadraceError) -> None:
        """Answer everything that waits with an error."""
        waiting, self._waiting, self._waiting_bytes = list(self._waiting), deque(), 0
        for one in waiting:
            one.answer.resolve(error)

    # Commits.

    def next_version(self, key: bytes) -> int:
        """The version of a key's next message after all commits under way, once that `is_known`."""
        return self.index.next_version(key) + self._reserved.get(key, 0)

    def hold(self, keys: Mapping[bytes, int] | None) -> "VersionHold":
        """Reserve the keys of a commit that was just recorded; None if they are not known."""
        self._holds += 1
        if keys is None:
            self._unknown_holds += 1
        for key, count in (keys or {}).items():
            self._reserved[key] = self._reserved.get(key, 0) + count
        return VersionHold(self, keys)

    def release(self, keys: Mapping[bytes, int] | None) -> None:
        """End a hold: the commit's messages are appended."""
        self._holds -= 1
        if keys is None:
            self._unknown_holds -= 1
            if not self._unknown_holds:
                self._ports.call_soon(self._tell_known)
        for key, count in (keys or {}).items():
            left = self._reserved[key] - count
            if left:
                self._reserved[key] = left
            else:
                del self._reserved[key]
        if self._waiting:
            self._ports.call_soon(self._release)

    def _tell_known(self) -> None:
        listeners, self._unknown_listeners = self._unknown_listeners, []
        for tell in listeners:
            tell(None)

    def fail(self, error: HeadraceError) -> None:
        """Refuse everything from now on: whether a commit counts is known after a restart."""
        self._failure = error
        self.fail_waiting(error)


class VersionHold(NamedTuple):
    """A commit's hold on a partition."""

    gate: VersionGate
    keys: Mapping[bytes, int] | None

    def release(self) -> None:
        """The commit's messages are appended."""
        self.gate.release(self.keys)

    def fail(self, error: HeadraceError) -> None:
        """The journal failed."""
        self.gate.fail(error)


def check_countable(*, committing: bool, removing: bool) -> None:
    """Raise Busy while messages come and go that the versions of a topic would have to count."""
    if committing:
        raise Busy("transactions are being committed, which key_versions would have to count; try again")
    if removing:
        raise Busy("messages are being removed, which key_versions would have to count; try again")
