"""A look at a data directory: whether journal, format and partitions fit together. Changes nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from headrace.broker.facts import BrokerState, partition_name
from headrace.engines.api import DataDirectory, DataFormat, FoundOwner, PartitionPath, lost_floor
from headrace.model.errors import DiskFailed, HeadraceError, InvalidArgument, TooManyFiles, UnsupportedFormat
from headrace.model.topic import Storage, topic_settings


class Problem(msgspec.Struct, frozen=True):
    """Something that has to be put in order before a broker can use the directory, or all of it."""

    path: str
    problem: str


class Missing(msgspec.Struct, frozen=True):
    """Messages that were synced, as the journal says, and are not in the files of their partition."""

    path: str
    """The directory of the partition."""
    first_offset: int
    next_offset: int
    reason: str


@dataclass
class Inspection:
    """What was found."""

    format: DataFormat | None = None
    state: BrokerState | None = None
    """What the journal tells; None when it cannot be read at all."""
    problems: list[Problem] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Why the journal cannot be all that was ever written to it."""
    notes: list[Problem] = field(default_factory=list)
    """What a broker deals with by itself, or leaves where it is."""
    owners: dict[PartitionPath, FoundOwner] = field(default_factory=dict)
    foreign: dict[PartitionPath, str] = field(default_factory=dict)
    """Partitions that are not this directory's, or not in their place, and why."""

    @property
    def identity(self) -> str:
        """That of the directory, as its format file says; else as most partitions do, else as the journal does."""
        if self.format is not None:
            return self.format.identity
        names = [found.owner.identity for found in self.owners.values() if found.owner is not None]
        journal = self.state.broker_id if self.state is not None else ""
        return max(sorted(set(names)), key=names.count, default=journal)


def inspect(data: DataDirectory) -> Inspection:
    """Look at all of it but the messages. Raises when a newer Headrace has written it."""
    found = Inspection(data.read_format())
    if found.format is None:
        found.problems.append(Problem(data.format_path, "the format file is missing or damaged"))
    # First the partitions: a broker at work writes to its journal before it makes one.
    found.owners = {place: data.owner(place.path) for place in data.partitions()}
    _set_foreign_format_apart(data, found)
    _read_journal(data, found)
    for place, owner in found.owners.items():
        _look_at(data, found, place, owner)
    if found.state is not None:
        _look_for_missing(data, found, found.state)
    found.notes += [Problem(path, "not a partition; a broker leaves it where it is") for path in data.unknown_names()]
    return found


def find_missing(data: DataDirectory, state: BrokerState) -> list[Missing]:
    """Find messages that were synced and that have no files; a broker may be at work since the journal was read."""
    found = [one for path, floor in lost_floors(data, state).items() for one in _missing_below(data, path, floor)]
    if not found:
        return found
    again = Inspection()
    _read_journal(data, again)  # a topic that was deleted meanwhile has no files
    floors = lost_floors(data, again.state) if again.state is not None else {one.path: 0 for one in found}
    return [one for one in found if one.path in floors]


def lost_floors(data: DataDirectory, state: BrokerState) -> dict[str, int]:
    """By directory: the offset below which all messages of a partition were synced, for those that have any."""
    floors = {}
    for topic in state.topics.values():
        try:
            settings = topic_settings(topic.settings)
        except InvalidArgument:
            continue  # a broker does not open it
        for number in range(settings.partitions if settings.storage is Storage.DISK else 0):
            floor = lost_floor(settings, state.producers.get(partition_name(topic.id, number)))
            if floor:
                floors[data.partition_path(topic.id, number)] = floor
    return floors


def _missing_below(data: DataDirectory, path: str, floor: int) -> Iterator[Missing]:
    try:
        extent = data.log_extent(path)
    except (HeadraceError, OSError):
        return  # checking the log says why
    if extent is None:
        yield Missing(path, 0, floor, "there are no files of the partition")
        return
    if extent.first_offset < min(extent.begin, floor):
        yield Missing(path, extent.first_offset, min(extent.begin, floor), "the first segment is missing")
    if extent.end < floor:
        yield Missing(path, extent.end, floor, "the log ends before them")


def _set_foreign_format_apart(data: DataDirectory, found: Inspection) -> None:
    """Pass over a format file that is of another directory than the journal and all the partitions."""
    identities = {one.owner.identity for one in found.owners.values() if one.owner is not None}
    if found.format is None or len(identities) != 1 or found.format.identity in identities:
        return
    [identity] = identities
    try:
        journal = data.read_journal()
        belongs = _added_up(journal.facts(journal.survey().start)).broker_id == identity
    except Exception:  # noqa: BLE001 a journal with gaps may fail in any way, and then proves nothing
        belongs = False
    if belongs:
        what = f"it is of the data directory {found.format.identity}; journal and partitions are of {identity}"
        found.problems.append(Problem(data.format_path, what))
        found.format = data.format = None


def knows(state: BrokerState, place: PartitionPath) -> bool:
    """Whether the journal knows of a partition."""
    topic = state.topics.get(place.topic_id)
    return topic is not None and place.number < topic.settings.get("partitions", 1)


def proof_of_loss(data: DataDirectory, state: BrokerState, place: PartitionPath) -> str | None:
    """What a partition that the journal does not know proves: that the journal is not whole, or nothing.

    It says that the journal had it; or it has messages, and the machine was not started again since, so that no power
    loss can have taken the topic back.
    """
    found = data.owner(place.path)
    newer = place.topic_id in state.topics or place.topic_id > state.topic_id
    if found.owner is None or found.owner.key != (state.broker_id, place.topic_id, place.number):
        return None
    if not newer or not (found.owner.journaled or (found.same_boot and data.holds_messages(place.path))):
        return None
    return f"the end of the journal is missing: it does not know {found.owner}, which is in {place.path}"


def _read_journal(data: DataDirectory, found: Inspection) -> None:
    trouble: str | None = None
    state = BrokerState()
    try:
        if data.holds_files(data.journal_path):
            journal = data.read_journal()
            survey = journal.survey()
            trouble = data.lost_text(survey.lost) if survey.lost else None
            for damage in survey.harmless:
                found.notes.append(Problem(data.journal_path, f"damaged where nothing depends on it: {damage}"))
            state = _added_up(journal.facts(survey.start))
        found.state = state
    except Exception as error:  # a journal with gaps may fail in any way
        if isinstance(error, UnsupportedFormat | DiskFailed | TooManyFiles):
            raise  # a newer Headrace knows what is in it; or the system does not let us read it, and nobody does
        trouble = trouble or f"the journal in {data.journal_path} cannot be read: {error}"
    trouble = trouble or data.journal_trouble(state.broker_id, state.session)
    if trouble:
        found.lost.append(trouble)
        found.problems.append(Problem(data.journal_path, trouble))


def _added_up(facts: Iterator[bytes | None]) -> BrokerState:
    state = BrokerState()
    for content in facts:
        if content is None:
            state = BrokerState()
        else:
            state.apply_bytes(content)
    return state


def _look_at(data: DataDirectory, found: Inspection, place: PartitionPath, owner: FoundOwner) -> None:
    state = found.state
    if owner.owner is not None and (why := _misplaced(found, place, owner)):
        found.foreign[place] = why
        found.problems.append(Problem(place.path, why))
    elif state is None or knows(state, place):
        return
    elif place.topic_id in state.gone:
        found.notes.append(Problem(place.path, "its topic is deleted; a broker removes it"))
    elif proof := proof_of_loss(data, state, place):
        found.lost.append(proof)
        found.problems.append(Problem(place.path, proof))
    else:
        found.notes.append(Problem(place.path, "the journal knows no such partition; a broker sets it aside"))


def _look_for_missing(data: DataDirectory, found: Inspection, state: BrokerState) -> None:
    """Note partitions that producers have written to and that have no files, unless messages in them were synced."""
    names = {partition_name(place.topic_id, place.number) for place in found.owners}
    floors = lost_floors(data, state)
    for name in sorted(state.producers.keys() - names):
        path = f"{data.path}/topics/{name}"
        if path not in floors:  # or they are missing: see find_missing
            note = "there are no files of this partition, though it had messages; a broker begins it anew"
            found.notes.append(Problem(path, note))


def _misplaced(found: Inspection, place: PartitionPath, owner: FoundOwner) -> str | None:
    """Why a partition does not belong where it is, if it does not."""
    says = owner.owner
    assert says is not None
    if found.identity and says.identity != found.identity:
        return f"it holds {says}, not of this one, {found.identity}"
    if (says.topic_id, says.partition) != (place.topic_id, place.number):
        return f"it holds {says}, which belongs elsewhere"
    return None
