"""Puts a data directory in order that a broker refuses: state from the journal's good parts and from the partitions."""

from collections.abc import Callable, Iterator

import msgspec

from headrace.broker.commit_applier import STAGES_BITS
from headrace.broker.facts import BrokerState, IdsReserved, encode_fact
from headrace.broker.inspection import Inspection, Problem, inspect
from headrace.broker.journal_salvage import Salvaged, salvage, topics_of
from headrace.broker.upgrade import upgrade_logs
from headrace.engines.api import DataDirectory, Findings, Gap, Journal
from headrace.model.errors import DiskFailed, HeadraceError, TooManyFiles

_AHEAD = 1 << 20
"""How far behind the highest number found the next ones begin, where some may be lost: nobody was given so many."""


class CheckedLog(msgspec.Struct):
    """What was found in a log."""

    path: str
    findings: Findings
    error: str = ""
    """Why it could not be looked at, or only in part."""

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.findings.sound and not self.error


class Verified(msgspec.Struct):
    """What a look at a whole data directory found."""

    path: str
    identity: str
    topics: int
    problems: list[Problem]
    notes: list[Problem]
    logs: list[CheckedLog]
    aside: list[Problem]
    """What was set aside earlier."""

    @property
    def sound(self) -> bool:
        """Whether a broker can use all of it."""
        return not self.problems and all(log.sound for log in self.logs)


class Repaired(msgspec.Struct):
    """What a repair found and did."""

    path: str
    identity: str = ""
    problems: list[Problem] = []
    set_aside: list[Problem] = []
    """Paths where things are now, and why."""
    topics: list[str] = []
    """All topics there are afterwards."""
    topics_found: list[str] = []
    settings_found: list[str] = []
    groups: int = 0
    subscriptions: int = 0
    schedules: int = 0
    not_restored: list[str] = []
    """What could not be, in sentences."""
    logs: list[CheckedLog] = []

    @property
    def changed(self) -> bool:
        """Whether there was anything to do."""
        return bool(self.problems) or not all(log.sound for log in self.logs)


def verify(data: DataDirectory, progress: Callable[[int], None], *, running: bool) -> Verified:
    """Look at all of a data directory, and at every byte of its logs; a broker may be at work."""
    data.check_used()
    found = inspect(data)
    logs = list(_each_log(data, progress, lambda path, tell: data.verify_log(path, tell, ended=not running)))
    topics = len(found.state.topics) if found.state is not None else 0
    aside = [Problem(*one) for one in data.set_aside.entries()]
    return Verified(data.path, found.identity, topics, found.problems, found.notes, logs, aside)


def repair(data: DataDirectory, new_id: str, now_us: int, progress: Callable[[int], None]) -> Repaired:
    """Make a data directory whole, whatever is left of it; whoever calls holds its lock.

    Nothing is removed. It may be killed at any moment and begun again.
    """
    data.check_used()
    if data.stored_format() is None:
        upgrade_logs(data, lambda _: None)  # an upgrade refuses a directory whose format nobody knows
    found = inspect(data)
    done = Repaired(data.path, problems=found.problems)
    _Repair(data, found, done, new_id, now_us).run()
    done.logs = list(_each_log(data, progress, data.repair_log))
    return done


class _Repair:
    """One repair."""

    def __init__(self, data: DataDirectory, found: Inspection, done: Repaired, new_id: str, now_us: int) -> None:
        self._data = data
        self._found = found
        self._done = done
        self._now_us = now_us
        self._identity = found.identity or new_id
        self._journal_of = "" if found.state is None else found.state.broker_id
        self._lost = bool(found.lost) or self._journal_of not in ("", self._identity)

    def run(self) -> None:
        """Do it: first what is in the way, then the journal, and the format file when all else is on the disk."""
        found = self._found
        self._done.identity = self._identity
        state = found.state or BrokerState()
        if found.problems:
            for place, why in found.foreign.items():
                self._set_aside(place.path, why)
            salvaged = self._salvaged()
            state = salvaged.state
            self._move_replaced(salvaged)
            self._reserve(state)
            self._keep_staged(state)
            self._write(state)
            self._tell(salvaged)
        self._done.topics = sorted(fact.name for fact in state.topics.values())
        self._done.groups, self._done.schedules = len(state.groups), len(state.schedules)
        self._done.subscriptions = len(state.leased.subscriptions)

    def _salvaged(self) -> Salvaged:
        owners = {place: self._data.owner(place.path).owner for place in self._data.partitions()}
        return salvage(self._facts(), topics_of(owners), whole=not self._lost)

    def _facts(self) -> Iterator[bytes | Gap | None]:
        """All facts of the journal that are left, if it is this directory's."""
        if self._journal_of not in ("", self._identity):
            self._set_aside(self._data.journal_path, f"it is the journal of the data directory {self._journal_of}")
            return
        if self._lost and self._data.holds_files(self._data.journal_path):
            kept = self._data.set_aside.copy(self._data.journal_path, "the journal as a repair found it")
            self._done.set_aside.append(Problem(kept, "the journal as it was"))
        try:
            # As the files are: whoever opens it to write cuts off what a power loss may have left behind damage.
            yield from self._data.read_journal().salvage()
        except (DiskFailed, TooManyFiles):
            raise  # the system does not let us read it: nobody knows what is in it
        except HeadraceError as error:
            yield Gap(f"the journal cannot be read: {error}")

    def _move_replaced(self, salvaged: Salvaged) -> None:
        for place in list(self._data.partitions()):
            if place.topic_id in salvaged.replaced:
                self._set_aside(place.path, "its topic must have been deleted: a newer one has its name")

    def _reserve(self, state: BrokerState) -> None:
        """See to it that no number is given out that somebody may have been given before."""
        format_ = self._found.format
        # Without a format file nobody knows how often a broker was started after the journal's end.
        session = state.session + _AHEAD if format_ is None else max(state.session, format_.session, format_.started)
        ids = [place.topic_id for place in self._found.owners]
        aside = [self._data.owner(one.path).owner for one in self._data.set_aside.entries()]
        ids += [owner.topic_id for owner in aside if owner is not None and owner.identity == self._identity]
        topic_id, ahead = max(ids, default=0), 0
        commits = 0
        if self._lost:
            ahead = _AHEAD
            marks = [self._last_mark(place.path) for place in self._data.partitions()]
            commits = max(marks, default=0) >> STAGES_BITS
        state.broker_id, state.session = self._identity, session
        state.apply(
            IdsReserved(
                topic_id=max(state.topic_id, topic_id) + ahead,
                subscription_id=state.leased.subscription_id + ahead,
                commits=max(state.commits, commits) + ahead,
            )
        )

    def _last_mark(self, path: str) -> int:
        try:
            return self._data.last_mark(path)
        except (HeadraceError, OSError) as error:
            self._done.not_restored.append(f"whether transactions wrote to {path} could not be read: {error}")
            return 0

    def _keep_staged(self, state: BrokerState) -> None:
        """Keep batches whose commit may have been lost: a broker would remove them."""
        if not self._lost:
            return
        path = self._data.staging_path
        try:
            staged = self._data.staged()
        except (HeadraceError, OSError) as error:
            kept = self._set_aside(path, f"it cannot be read: {error}")
            self._done.not_restored.append(f"what transactions had staged; it cannot be read, and is kept in {kept}")
            return
        known = {stage[0] for fact in state.unsettled.values() for stage in fact.stages}
        unknown = {offset: count for offset, count in staged.items() if offset not in known}
        if not unknown:
            return
        if state.unsettled or state.shared:
            kept = self._data.set_aside.copy(path, "batches of transactions that may have been committed")
            self._done.set_aside.append(Problem(kept, "a copy of what transactions had staged"))
        else:
            kept = self._set_aside(path, "batches of transactions that may have been committed")
        self._done.not_restored.append(
            f"{len(unknown)} staged batches with {sum(unknown.values())} messages are kept in {kept}: messages of "
            "transactions that were committed in the lost part of the journal, and not applied yet, are only there"
        )

    def _write(self, state: BrokerState) -> None:
        """Write the journal, then the format file; a snapshot counts when all of it is there."""
        journal = self._opened()
        try:
            journal.write_snapshot([encode_fact(fact) for fact in state.facts()], self._now_us)
            journal.sync()
        finally:
            journal.close()
        self._data.store_identity(self._identity, state.session)

    def _opened(self) -> Journal:
        try:
            return self._data.open_journal()
        except HeadraceError as error:
            self._set_aside(self._data.journal_path, f"it cannot be opened: {error}")
            return self._data.open_journal()

    def _set_aside(self, path: str, why: str) -> str:
        kept = self._data.set_aside.move(path, why)
        self._done.set_aside.append(Problem(kept, why))
        return kept

    def _tell(self, salvaged: Salvaged) -> None:
        done = self._done
        done.topics_found, done.settings_found = salvaged.topics_found, salvaged.settings_found
        done.not_restored += salvaged.unusable
        if self._lost:
            done.not_restored.append(
                "the lost part of the journal: positions of groups, acknowledgements, edits and schedules are as they "
                "were before it, so messages may be delivered again; a transaction that was committed in it is not "
                "recognised when it is committed again; topics that were deleted in it are back while their files are "
                "there, and topics without files, as those in memory, are not"
            )
        if salvaged.passed_over:
            done.not_restored.append(f"{salvaged.passed_over} facts about leases, which mean nothing without others")


def _each_log(
    data: DataDirectory, progress: Callable[[int], None], look: Callable[[str, Callable[[int], None]], Findings]
) -> Iterator[CheckedLog]:
    """Look at all logs, one after the other; progress is told in bytes of all of them."""
    before = 0
    for path in data.logs():
        try:
            findings = look(path, lambda done, before=before: progress(before + done))  # type: ignore[misc]
        except (HeadraceError, OSError) as error:
            if not data.holds_files(path):
                continue  # deleted this moment
            yield CheckedLog(path, Findings(), str(error))
        else:
            before += findings.bytes
            yield CheckedLog(path, findings)
