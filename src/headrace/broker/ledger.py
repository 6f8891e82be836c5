"""The broker's durable state: a fact is written to the journal first, then applied."""

import logging
from collections.abc import Callable, Iterator, Sequence

from headrace.broker.fact import Fact
from headrace.broker.facts import AnyFact, BrokerStarted, BrokerState, encode_fact
from headrace.broker.failure_log import FailureLog
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.broker.settings import BrokerSettings
from headrace.broker.slices import Steps, in_slices
from headrace.broker.sync_waiters import SyncWaiters
from headrace.engines.api import DataDirectory, Snapshot, Store, as_headrace_error
from headrace.model.errors import DiskFull, HeadraceError
from headrace.model.request import AnswerType
from headrace.model.requests import Done

logger = logging.getLogger("headrace.broker")

Written = Callable[[HeadraceError | None], None]

_SNAPSHOT_GROWTH = 4
_RECORD_BYTES = 100
"""What each writing adds, about."""
_SLICE_WORK = 32 << 10
_FACT_WORK = 2 << 10
"""A snapshot is made in slices of so many bytes; each fact counts for so many more."""
_DAY_US = 86_400_000_000
_SINCE_TOGETHER = 500
_SINCE_SLICES = 100
"""Facts that were written meanwhile and are added in a slice, in so many slices at most; then in one go."""


def _goes_on(now_us: int, last_us: int) -> int:
    """The time at the start: the clock may have been put back since, or it is that of another machine.

    A time that is more than a day away was told by a clock that was quite wrong, and does not count.
    """
    return last_us if now_us < last_us <= now_us + _DAY_US else now_us


class Ledger:
    """The state of a broker, and the journal from which it comes back."""

    def __init__(self, store: Store, ports: Ports, settings: BrokerSettings, new_id: str, now_us: int) -> None:
        """Read the journal; raises when the store has another's, or one that has lost something."""
        identity = new_id if store.data is None else store.data.begin(new_id).identity
        self._journal = journal = store.open_journal("journal")
        self._ports = ports
        self._settings = settings
        self.failures = FailureLog()
        self._syncing = SyncWaiters(journal, ports)
        self._end = 0
        self._written_bytes = 0
        """Of facts, since the last snapshot."""
        self._snapshot_bytes = 0
        self.now_us = now_us
        """When something was last recorded."""
        self._gathered: list[tuple[Sequence[AnyFact], Written]] = []
        self._gathered_us = now_us
        self.state = BrokerState()
        self._since: list[bytes] | None = None
        """What was written since the snapshot began that is being made; None when there is none."""
        self._closed = False
        self._snapshot_at: int | None = None
        """Where the last snapshot begins: the next one leaves it, in case that it is damaged one day."""
        self._replay(store.data)
        self.last_us = journal.last_us
        """When something was recorded before the start; 0 if nothing was."""
        self.start_us = self.now_us = _goes_on(now_us, self.last_us)
        self._begin(store.data, identity, self.start_us)

    def _begin(self, data: DataDirectory | None, identity: str, now_us: int) -> None:
        """Count the start. Epochs are made of the session's number: no power loss may bring it back."""
        state = self.state
        session = max(state.session, data.started if data is not None else 0) + 1
        began = BrokerStarted(state.broker_id or identity, session)
        try:
            self.record(now_us, began)
            self._journal.sync()
            if data is not None:
                data.note_start(session)
        except DiskFull as error:
            if data is None or not state.broker_id:
                raise  # a new broker
            data.note_start(session, journaled=False)
            if state.session != session:
                state.apply(began)
            logger.warning("broker started on a full disk: it serves what is there  reason=%s", error)

    @property
    def idle(self) -> bool:
        """Whether nobody waits for facts to be written or synced."""
        return self._syncing.idle and not self._gathered

    @property
    def synced(self) -> bool:
        """Whether all that was recorded is safe."""
        return self._journal.synced

    def _replay(self, data: DataDirectory | None) -> None:
        survey = self._journal.survey()
        if data is not None:
            data.check_whole(survey.lost)
        for content in self._journal.facts(survey.start):
            if content is None:
                self.state = BrokerState()
                self._written_bytes = 0
            else:
                self.state.apply_bytes(content)
                self._written_bytes += len(content)
        if data is not None:
            data.check_journal(self.state.broker_id, self.state.session)
        for damage in survey.harmless:
            logger.warning("journal damaged where nothing depends on it  damage=%s", damage)
        self._snapshot_at = survey.snapshot

    def record(self, now_us: int, *facts: AnyFact) -> None:
        """Write facts, all or none, and apply them; `durably` waits until they are synced."""
        self.flush()  # what was decided before comes before
        self._write(facts, now_us)

    def gather(self, now_us: int, facts: Sequence[AnyFact], written: Written) -> None:
        """Write facts soon, together with others; calls back when they are applied, or with the error."""
        if not self._gathered:
            self._ports.call_soon(self.flush)
        self._gathered.append((facts, written))
        self._gathered_us = now_us

    def flush(self) -> None:
        """Write the gathered facts."""
        gathered, self._gathered = self._gathered, []
        if not gathered:
            return
        failure: HeadraceError | None = None
        try:
            self._write([fact for facts, _ in gathered for fact in facts], self._gathered_us)
        except HeadraceError as error:
            failure = error
        except OSError as error:
            failure = as_headrace_error(error)
        for _, written in gathered if failure is None else reversed(gathered):  # what was decided last is undone first
            written(failure)

    def _write(self, facts: Sequence[AnyFact], now_us: int) -> None:
        encoded = [encode_fact(fact) for fact in facts]
        self._end = self._journal.write(encoded, now_us)
        self.now_us = now_us
        for fact in facts:
            self.state.apply(fact)
        self._written_bytes += sum(map(len, encoded)) + _RECORD_BYTES
        if self._since is not None:
            self._since += encoded
        elif self._written_bytes > max(self._settings.journal_bytes, _SNAPSHOT_GROWTH * self._snapshot_bytes):
            self._begin_snapshot(now_us)

    def durably(self, answer: AnswerType) -> PendingAnswer[AnswerType]:
        """The answer, once all that was recorded so far is synced."""
        pending_answer: PendingAnswer[AnswerType] = PendingAnswer(is_committed=True)

        def tell(error: HeadraceError | None) -> None:
            pending_answer.resolve(answer if error is None else error)

        self._syncing.wait(self._end, tell)
        return pending_answer

    @property
    def is_committed(self) -> bool:
        """Whether all that was decided so far is synced, and everybody who waited for that knows; writes what is not.

        Who asks may then tell what it likes: nothing that others are still to be told is overtaken.
        """
        if self._gathered:
            self.flush()
        return self._journal.synced and self._syncing.idle

    def when_committed(self, tell: Written) -> None:
        """Call back when all that was decided so far is synced: now if it is, else in the order of these calls."""
        if self.is_committed:
            tell(None)
        else:
            self._syncing.wait(self._end, tell)

    def request_sync(self) -> None:
        """Sync what was recorded soon, although nobody waits for it."""
        if not self.synced and self.idle:
            self._syncing.wait(self._end, lambda _: None)

    def close(self) -> None:
        """Sync and close the journal."""
        self.flush()
        self._closed = True
        self._journal.close()

    def _begin_snapshot(self, now_us: int) -> None:
        """Make a snapshot of all that counts now, in slices; what is written meanwhile is added to it in the end."""
        self.state.forget_transactions(now_us - round(self._settings.transactions_kept_seconds * 1e6))
        self._since, self._written_bytes = [], 0
        in_slices(self._ports, self._snapshot(self.state.facts(), now_us))

    def _snapshot(self, facts: Iterator[Fact], now_us: int) -> Steps:
        snapshot, work = Snapshot(now_us), 0
        assert self._since is not None
        try:
            for fact in facts:
                encoded = encode_fact(fact)
                snapshot.add(encoded)
                work += _FACT_WORK + len(encoded)
                if work >= _SLICE_WORK:
                    work = 0
                    yield
            for _ in range(_SINCE_SLICES):  # there may be more and more of them
                some, self._since = self._since[:_SINCE_TOGETHER], self._since[_SINCE_TOGETHER:]
                for encoded in some:
                    snapshot.add(encoded)
                if not self._since:
                    break
                yield
            if not self._closed:
                self._write_snapshot(snapshot)
        finally:
            self._since = None
        return Done()

    def _write_snapshot(self, snapshot: Snapshot) -> None:
        for encoded in self._since or ():
            snapshot.add(encoded)
        self._snapshot_bytes = snapshot.bytes
        try:
            begin = self._journal.append_snapshot(snapshot, self.now_us)
        except (HeadraceError, OSError) as error:
            # What was recorded counts all the same, and the journal is whole; the next snapshot comes in its time.
            logger.warning("journal snapshot not written; trying again when the journal has grown  reason=%s", error)
            return
        before, self._snapshot_at = self._snapshot_at, begin
        if before is not None:
            self._ports.background(lambda: self._journal.forget_before(before))
