"""Verifies a data directory, and repairs it: restores the state from what is left of the journal and partitions."""

from collections.abc import Callable, Iterator

import msgspec

from headrace.broker.commit_applier import STAGES_BITS
from headrace.broker.facts import BrokerState, IdsReserved, encode_fact
from headrace.broker.inspection import Inspection, Missing, Problem, find_missing, inspect, lost_floors
from headrace.broker.journal_salvage import Salvaged, salvage, topics_of
from headrace.broker.upgrade import upgrade_logs
from headrace.engines.api import DataDirectory, Findings, Gap, Journal
from headrace.model.errors import DiskFailed, HeadraceError, TooManyFiles

_AHEAD = 1 << 20
"""The gap left above the highest known number where higher ones may be lost, so that none is used twice."""


class CheckedLog(msgspec.Struct):
    """The result of checking a log."""

    path: str
    findings: Findings
    error: str = ""
    """Why the log could not be checked, or only in part."""

    @property
    def sound(self) -> bool:
        """Whether the log is undamaged and could be checked."""
        return self.findings.sound and not self.error


class Verified(msgspec.Struct):
    """The result of verifying a data directory."""

    path: str
    identity: str
    topics: int
    problems: list[Problem]
    notes: list[Problem]
    logs: list[CheckedLog]
    aside: list[Problem]
    """Files that earlier repairs set aside, and why."""
    missing: list[Missing] = []

    @property
    def sound(self) -> bool:
        """Whether a broker can use the whole directory."""
        return not (self.problems or self.missing) and all(log.sound for log in self.logs)


class Repaired(msgspec.Struct):
    """The result of a repair: what it found and what it did."""

    path: str
    identity: str = ""
    problems: list[Problem] = []
    set_aside: list[Problem] = []
    """The new paths of files that the repair set aside, and why."""
    topics: list[str] = []
    """All topics after the repair."""
    topics_found: list[str] = []
    settings_found: list[str] = []
    groups: int = 0
    subscriptions: int = 0
    schedules: int = 0
    not_restored: list[str] = []
    """What the repair could not restore, as sentences for people."""
    logs: list[CheckedLog] = []

    @property
    def changed(self) -> bool:
        """Whether the repair found anything to mend."""
        return bool(self.problems) or not all(log.sound for log in self.logs)


def verify(data: DataDirectory, progress: Callable[[int], None], *, running: bool) -> Verified:
    """Verify a data directory and every byte of its logs; a broker may be running."""
    data.check_used()
    found = inspect(data)
    logs = list(_each_log(data, progress, lambda path, tell: data.verify_log(path, tell, ended=not running)))
    topics = len(found.state.topics) if found.state is not None else 0
    aside = [Problem(*one) for one in data.set_aside.entries()]
    # After the journal was read: what it says was synced is in the files by now, or was removed in order.
    missing = find_missing(data, found.state) if found.state is not None else []
    return Verified(data.path, found.identity, topics, found.problems, found.notes, logs, aside, missing)


def repair(data: DataDirectory, new_id: str, now_us: int, progress: Callable[[int], None]) -> Repaired:
    """Make a data directory usable again, whatever is left of it; the caller holds its lock.

    A repair removes nothing, and may be killed at any moment and repeated.
    """
    data.check_used()
    if data.stored_format() is None:
        upgrade_logs(data, lambda _: None)  # an upgrade refuses a directory whose format nobody knows
    found = inspect(data)
    done = Repaired(data.path, problems=found.problems)
    state = _Repair(data, found, done, new_id, now_us).run()
    _repair_logs(data, state, done, progress)
    return done


def _repair_logs(data: DataDirectory, state: BrokerState, done: Repaired, progress: Callable[[int], None]) -> None:
    """Repair all logs; synced messages that are missing become gaps, in new files where a partition has none."""
    floors = lost_floors(data, state)
    gone = {path: floor for path, floor in floors.items() if _has_no_files(data, path)}
    for path, floor in gone.items():
        done.not_restored.append(f"messages with offsets below {floor} of {path}: there are no files of the partition")
        data.make_partition(path)

    def repair_log(path: str, tell: Callable[[int], None]) -> Findings:
        return data.repair_log(path, tell, lost_floor=floors.get(path, 0), create=path in gone)

    done.logs = list(_each_log(data, progress, repair_log))


def _has_no_files(data: DataDirectory, path: str) -> bool:
    try:
        return data.log_extent(path) is None
    except (HeadraceError, OSError):
        return False  # repairing the log says why


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

    def run(self) -> BrokerState:
        """Set foreign files aside, then write the journal, and last the format file, once all else is synced.

        Returns what the journal says then.
        """
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
            self._report(salvaged)
        self._done.topics = sorted(fact.name for fact in state.topics.values())
        self._done.groups, self._done.schedules = len(state.groups), len(state.schedules)
        self._done.subscriptions = len(state.leased.subscriptions)
        return state

    def _salvaged(self) -> Salvaged:
        owners = {place: self._data.owner(place.path).owner for place in self._data.partitions()}
        return salvage(self._facts(), topics_of(owners), whole=not self._lost)

    def _facts(self) -> Iterator[bytes | Gap | None]:
        """The readable facts of the journal, if it belongs to this directory."""
        if self._journal_of not in ("", self._identity):
            self._set_aside(self._data.journal_path, f"it is the journal of the data directory {self._journal_of}")
            return
        if self._lost and self._data.holds_files(self._data.journal_path):
            kept = self._data.set_aside.copy(self._data.journal_path, "the journal as a repair found it")
            self._done.set_aside.append(Problem(kept, "the journal as it was"))
        try:
            # Read-only: opening the journal for writing would truncate it at the first damage.
            yield from self._data.read_journal().salvage()
        except (DiskFailed, TooManyFiles):
            raise  # the operating system refuses to read it, so its facts may be intact
        except HeadraceError as error:
            yield Gap(f"the journal cannot be read: {error}")

    def _move_replaced(self, salvaged: Salvaged) -> None:
        for place in list(self._data.partitions()):
            if place.topic_id in salvaged.replaced:
                self._set_aside(place.path, "its topic was deleted: a newer topic has its name")

    def _reserve(self, state: BrokerState) -> None:
        """Reserve ids, so that a broker uses none that may have been used before."""
        format_ = self._found.format
        # Without a format file the number of starts after the journal's end is unknown.
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
            self._done.not_restored.append(
                f"the last transaction that wrote to {path}, which could not be read: {error}"
            )
            return 0

    def _keep_staged(self, state: BrokerState) -> None:
        """Set aside staged batches whose commit may be lost, because a broker would remove them."""
        if not self._lost:
            return
        path = self._data.staging_path
        try:
            staged = self._data.staged()
        except (HeadraceError, OSError) as error:
            kept = self._set_aside(path, f"it cannot be read: {error}")
            self._done.not_restored.append(
                f"batches staged by transactions; the staging log cannot be read, and is kept in {kept}"
            )
            return
        known = {stage[0] for fact in state.unsettled.values() for stage in fact.stages}
        unknown = {offset: count for offset, count in staged.items() if offset not in known}
        if not unknown:
            return
        if state.unsettled or state.shared:
            kept = self._data.set_aside.copy(path, "batches of transactions that may have been committed")
            self._done.set_aside.append(Problem(kept, "a copy of the staging log"))
        else:
            kept = self._set_aside(path, "batches of transactions that may have been committed")
        self._done.not_restored.append(
            f"{len(unknown)} staged batches with {sum(unknown.values())} messages are kept in {kept}: messages of "
            "transactions whose commit was in the lost part of the journal, and not applied yet, are only there"
        )

    def _write(self, state: BrokerState) -> None:
        """Write the state as a snapshot to the journal, then the format file; an incomplete snapshot is ignored."""
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

    def _report(self, salvaged: Salvaged) -> None:
        done = self._done
        done.topics_found, done.settings_found = salvaged.topics_found, salvaged.settings_found
        done.not_restored += salvaged.unusable
        if self._lost:
            done.not_restored.append(
                "the lost part of the journal: group offsets, acknowledgements, edits and schedules are as they were "
                "before it, so messages may be delivered again; a transaction whose commit is lost is not recognised "
                "when a client commits it again; topics whose deletion is lost are back if their files exist; topics "
                "without files, such as topics in memory, are lost if their creation is"
            )
        if salvaged.passed_over:
            done.not_restored.append(f"{salvaged.passed_over} facts that depend on lost ones, such as leases")


def _each_log(
    data: DataDirectory, progress: Callable[[int], None], look: Callable[[str, Callable[[int], None]], Findings]
) -> Iterator[CheckedLog]:
    """Check all logs, one after the other; reports progress in bytes of all of them."""
    before = 0
    for path in data.logs():
        try:
            findings = look(path, lambda done, before=before: progress(before + done))  # type: ignore[misc]
        except (HeadraceError, OSError) as error:
            if not data.holds_files(path):
                continue  # deleted meanwhile
            yield CheckedLog(path, Findings(), str(error))
        else:
            before += findings.bytes
            yield CheckedLog(path, findings)
