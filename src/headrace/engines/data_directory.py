"""A broker's data directory: its format and identity, its partitions, and its logs while no broker runs."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import msgspec

from headrace.engines.journal import Journal, JournalReader
from headrace.engines.producers import TRANSACTIONS, mark_of
from headrace.engines.set_aside import SetAsideFiles
from headrace.model.errors import DataDirectoryDamaged, LogNotFound, NotADataDirectory, UnsupportedFormat
from headrace.storage.log import FileLog
from headrace.storage.meta import read_meta
from headrace.storage.offline_reader import OfflineLogReader
from headrace.storage.owner import FoundOwner, PartitionOwner, read_owner
from headrace.storage.record import SlottedRecord, is_torn
from headrace.storage.recovery import Findings, segment_bases
from headrace.storage.replicated.keys import NODE_STATE_NAME, SHARDS_NAME
from headrace.storage.runtime import StorageRuntime
from headrace.storage.segment import DATA_AT, segment_path
from headrace.storage.upgrade import Amend, UpgradedLog, upgrade_log

logger = logging.getLogger("headrace.storage")

TOPICS = "topics"
OWN = "broker"
JOURNAL = f"{OWN}/journal"
STAGING = f"{OWN}/staging"
FORMAT_NAME = "format"
UNFINISHED = ".unfinished"
"""The folder in which a copy of a cluster is made; as long as it is there, the copy is not whole."""

FORMAT = 2
"""The number of the format that this Headrace reads and writes."""
FORMER_FORMAT = 1
"""The format that `headrace upgrade` brings over."""
UPGRADING = 1
"""The required feature that says that an upgrade was begun, and has to be finished first."""
REQUIRED_KNOWN = UPGRADING
"""The required features that this Headrace knows, as bits: a directory that needs another is refused."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_TOLERATED = {"lock", "headrace.sock", "lost+found"}
"""Besides files whose names begin with a dot: what a directory may hold before a broker uses it."""
_SHOWN = 3


class DataFormat(msgspec.Struct, array_like=True, frozen=True):
    """The content of the format file."""

    number: int
    required: int
    """Features, as bits, that a Headrace must know to use the directory."""
    optional: int
    """Features, as bits, that a Headrace may ignore."""
    identity: str
    """The broker's id: its journal and its partitions carry the same."""
    session: int
    """How often a broker was started here, according to the journal; 0 if none got so far as to store anything."""
    started: int = 0
    """The same, with starts that a full disk kept from the journal; 0 if there were none."""


_format_decoder = msgspec.msgpack.Decoder(DataFormat)


class PartitionPath(NamedTuple):
    """The directory of a partition."""

    topic_id: int
    number: int
    path: str


class LogExtent(NamedTuple):
    """The offsets of which a log has files."""

    first_offset: int
    """The oldest offset that the log has, as its record says."""
    begin: int
    """The offset at which its files begin; later than the first one if segments are missing."""
    end: int


class DataDirectory:
    """A data directory, in use or inspected. Whoever changes it must hold its lock."""

    def __init__(self, host: StorageRuntime, path: str, *, is_node_copy: bool = False) -> None:
        """Look at a directory, which may be the copy of a node of a cluster only if the caller knows that it is one."""
        self.host = host
        self._is_node_copy = is_node_copy or host.disk.is_replicated
        self.path = path
        self._disk = host.disk
        self.set_aside = SetAsideFiles(host.disk, path)
        """What the broker or a repair has moved out of use."""
        self.format: DataFormat | None = None
        """The content of the format file, once it was read or written."""
        self.format_path = f"{path}/{FORMAT_NAME}"
        self.journal_path = f"{path}/{JOURNAL}"
        self.staging_path = f"{path}/{STAGING}"

    # Format and identity.

    def begin(self, new_id: str) -> DataFormat:
        """Read the format file, or create it in a new directory, before any other file.

        Raises if the directory cannot be used.
        """
        self.check_usable()
        found = self.format
        if found is None:
            found = self.store_identity(new_id, 0)
        for name in (TOPICS, OWN):
            self._disk.make_directory(f"{self.path}/{name}", private=True)
        # Always: the broker that created them may have been killed before their names were on the disk.
        self._disk.sync_directory(self.path)
        return found

    def read_format(self) -> DataFormat | None:
        """What the format file says; None when it is missing or damaged. Raises when this Headrace cannot use it."""
        found = self.stored_format()
        if found is not None and (found.number == FORMER_FORMAT or found.required & UPGRADING):
            begun = ", and an upgrade was begun and not finished" if found.number == FORMAT else ""
            raise UnsupportedFormat(
                f"{self.path} was written by an earlier Headrace{begun}; `headrace upgrade {self.path}` brings it over",
                format=found.number,
            )
        self.format = found or self.format
        return found

    def stored_format(self) -> DataFormat | None:
        """What the format file says, also one that is to be brought over; None when it is missing or damaged."""
        path = self.format_path
        content = SlottedRecord(self._disk, path, write=False).load() if self._disk.exists(path) else None
        return None if content is None else _decoded(content, self.path)

    def known_format(self) -> DataFormat:
        """What the format file says, also one that is to be brought over; raises when it is missing or damaged."""
        found = self.stored_format()
        if found is None:
            raise self.damaged(f"the format file {self.format_path} is missing or damaged")
        return found

    def upgrade_log(self, path: str, progress: Callable[[int], None], amend: Amend | None = None) -> UpgradedLog:
        """Bring over a log of the former format."""
        return upgrade_log(self.host, path, progress, amend)

    def write_format(self, content: DataFormat) -> None:
        """Write the format file and sync it."""
        self._disk.make_directory(self.path, private=True)
        record = SlottedRecord(self._disk, self.format_path, write=True, create=True)
        record.store(msgspec.msgpack.encode(content))
        self._disk.sync_directory(self.path)
        self.format = content

    def check_whole(self, lost: list[str]) -> None:
        """Raise if facts of the journal are lost."""
        if lost:
            raise self.damaged(self.lost_text(lost))

    def lost_text(self, lost: list[str]) -> str:
        """The text of an error for a journal that has lost facts."""
        return f"the journal in {self.journal_path} is damaged, and facts are lost: {'; '.join(lost)}"

    def check_journal(self, identity: str, session: int) -> None:
        """Raise if the journal is another directory's, or is known to be incomplete."""
        if trouble := self.journal_trouble(identity, session):
            raise self.damaged(trouble)

    def journal_trouble(self, identity: str, session: int) -> str | None:
        """What is wrong with a journal that names this identity and this last start; None if nothing is."""
        known, path = self.format, self.journal_path
        if not identity:
            used = (known is not None and known.session) or next(self.partitions(), None) is not None
            return f"the journal in {path} is missing or empty" if used else None
        if known is not None and identity != known.identity:
            return f"the journal in {path} is of the data directory {identity}, not of this one, {known.identity}"
        if known is not None and session < known.session:
            return (
                f"the end of the journal in {path} is missing: it knows of {session} starts of the broker, and there "
                f"were {known.session}"
            )
        return None

    @property
    def started(self) -> int:
        """The number of the last start, according to the format file."""
        return max(self.format.session, self.format.started) if self.format is not None else 0

    def note_start(self, session: int, *, journaled: bool = True) -> None:
        """Record in the format file that the journal has this start on the disk: a journal without it is incomplete.

        Without `journaled`, record the start alone, as a full disk kept it from the journal; the format file is
        overwritten in place, which needs no space.
        """
        assert self.format is not None
        if journaled:
            self.store_identity(self.format.identity, session)
        else:
            self.write_format(msgspec.structs.replace(self.format, started=session))

    def store_identity(self, identity: str, session: int) -> DataFormat:
        """Write the format file with this identity and session; its features stay."""
        found = self.format or DataFormat(FORMAT, 0, 0, identity, session)
        found = msgspec.structs.replace(found, identity=identity, session=session)
        self.write_format(found)
        return found

    def damaged(self, found: str) -> DataDirectoryDamaged:
        """An error that says what was found and what to do."""
        return DataDirectoryDamaged(
            f"{found}; {self._holds()}, which were not touched. `headrace verify {self.path}` shows what there is, "
            f"`headrace repair {self.path}` puts it in order",
            path=self.path,
        )

    def _holds(self) -> str:
        count = sum(1 for _ in self.partitions())
        return f"{self.path} holds {count} partition{'' if count == 1 else 's'} of topics"

    def check_usable(self) -> None:
        """Raise if a broker may not use the directory; changes nothing."""
        self._check_own()
        if self.read_format() is not None:
            return
        if self.was_used():
            raise self.damaged(f"the format file {self.format_path} is missing or damaged")
        if foreign := self._foreign():
            shown = ", ".join(foreign[:_SHOWN]) + (" and more" if len(foreign) > _SHOWN else "")
            raise NotADataDirectory(
                f"{self.path} is not a broker's data directory, and has other files in it ({shown}); give a directory "
                "that is new or empty",
                path=self.path,
            )

    def check_used(self) -> None:
        """Raise when the directory is not that of a broker, or a broker was never at work in it."""
        self._check_own()
        if self.stored_format() is None and not self.was_used():
            raise NotADataDirectory(
                f"{self.path} is not a broker's data directory: there is nothing of a broker's in it"
            )

    def _check_own(self) -> None:
        """Raise if the directory is not one of a broker by itself, whatever is in it."""
        self.check_finished()
        self.check_no_node_copy()
        if self._is_node(self.path):
            raise self._of_node(self.path, f"{self.path} is the directory of a node of a cluster")

    def check_no_node_copy(self) -> None:
        """Raise if the directory is the copy of a shard that a node of a cluster keeps."""
        shards = self.path.rstrip("/").rpartition("/")[0]
        node, _, name = shards.rpartition("/")
        if not self._is_node_copy and name == SHARDS_NAME and self._is_node(node):
            raise self._of_node(node, f"{self.path} is the copy of a cluster that its node keeps in {node}")

    def _is_node(self, path: str) -> bool:
        return self._disk.exists(f"{path}/{NODE_STATE_NAME}") and self._disk.is_directory(f"{path}/{SHARDS_NAME}")

    def _of_node(self, node: str, found: str) -> NotADataDirectory:
        return NotADataDirectory(
            f"{found}, not the data directory of a broker by itself: the node compares its copy with the store at each "
            f"start, and fetches what differs. Start it with `headrace serve --data {node} --cluster NAME --store "
            "URL`, see it with `headrace cluster status`, or copy the cluster with `headrace cluster export`",
            path=self.path,
        )

    def check_finished(self) -> None:
        """Raise if the directory has a copy of a cluster that was begun and not finished."""
        if self._disk.exists(f"{self.path}/{UNFINISHED}"):
            raise NotADataDirectory(
                f"{self.path} is not a broker's data directory: a copy of a cluster was begun there and not finished "
                f"({UNFINISHED}); run the same `headrace cluster export` or `headrace restore` again, or give another "
                "directory",
                path=self.path,
            )

    def was_used(self) -> bool:
        """Whether the directory holds something that only a broker creates, besides the format file."""
        own = any(self._disk.names(f"{self.path}/{name}") for name in (JOURNAL, STAGING))
        return own or next(self.partitions(), None) is not None

    def _foreign(self) -> list[str]:
        """Names in the directory that do not belong to a broker."""
        foreign = []
        for name in self._disk.names(self.path):
            path = f"{self.path}/{name}"
            if name == FORMAT_NAME:
                file = self._disk.open(path)
                harmless = is_torn(self._disk.read(file, 0, self._disk.size(file)))
            elif name in (TOPICS, OWN):
                harmless = self._disk.is_directory(path) and not self._disk.names(path)
            else:
                harmless = name in _TOLERATED or name.startswith(".")
            if not harmless:
                foreign.append(name)
        return foreign

    # Partitions.

    def partitions(self) -> Iterator[PartitionPath]:
        """The directories of partitions, in order."""
        topics = f"{self.path}/{TOPICS}"
        for topic in sorted(filter(_NUMBER.fullmatch, self._disk.names(topics)), key=int):
            for number in sorted(filter(_NUMBER.fullmatch, self._disk.names(f"{topics}/{topic}")), key=int):
                yield PartitionPath(int(topic), int(number), f"{topics}/{topic}/{number}")

    def unknown_names(self) -> list[str]:
        """Paths below `topics` that cannot be partitions."""
        topics = f"{self.path}/{TOPICS}"
        found = []
        for topic in self._disk.names(topics):
            if _NUMBER.fullmatch(topic):
                numbers = self._disk.names(f"{topics}/{topic}")
                found += [f"{topics}/{topic}/{name}" for name in numbers if not _NUMBER.fullmatch(name)]
            else:
                found.append(f"{topics}/{topic}")
        return [path for path in found if "/." not in path.removeprefix(topics)]

    def owner(self, path: str) -> FoundOwner:
        """The owner that a partition's directory names."""
        return read_owner(self.host, path)

    def holds_messages(self, path: str) -> bool:
        """Whether a partition's files hold more than headers; zeros count, as nobody knows what they were."""
        with suppress(LogNotFound):  # it is being removed
            for base in segment_bases(self.host, path):
                if base or self._disk.size(self._disk.open(segment_path(path, base))) > DATA_AT:
                    return True
        return False

    def checked_owner(self, path: str, owner: PartitionOwner) -> PartitionOwner:
        """The owner to store in a partition's files; raises if they name another partition."""
        found = self.owner(path).owner
        if found is not None and found.key != owner.key:
            raise self.damaged(f"{path} holds {found}, not {owner}")
        return owner.after(found)

    def delete_topic(self, topic_id: int, identity: str) -> None:
        """Remove the files of a closed topic whose deletion is on the disk; slow, and allowed on any thread.

        Partitions of another data directory, which somebody has put there, are set aside.
        """
        root = f"{self.path}/{TOPICS}/{topic_id}"
        for number in filter(_NUMBER.fullmatch, self._disk.names(root)):
            owner = self.owner(f"{root}/{number}").owner
            if owner is None or (owner.identity, owner.topic_id) == (identity, topic_id):
                self._disk.remove_directory(f"{root}/{number}")
            else:
                self.set_aside.move(f"{root}/{number}", f"it holds {owner}, not what was deleted")
        if self._disk.exists(root) and not self._disk.names(root):
            self._disk.remove_directory(root)

    # Its logs, while no broker runs.

    def read_journal(self) -> JournalReader:
        """The journal, for reading its files as they are."""
        return JournalReader(OfflineLogReader(self.host, self.journal_path))

    def open_journal(self) -> Journal:
        """The journal, for writing."""
        return Journal(FileLog(self.host, self.journal_path, owned=True))

    def holds_files(self, path: str) -> bool:
        """Whether a directory has any entries."""
        return bool(self._disk.names(path))

    def logs(self) -> list[str]:
        """The directories of all logs."""
        own = [f"{self.path}/{name}" for name in (JOURNAL, STAGING)]
        return [path for path in own if self._disk.names(path)] + [partition.path for partition in self.partitions()]

    def size_bytes(self) -> int:
        """The total size of the segments of all logs."""
        return sum(
            self._disk.size(self._disk.open(segment_path(path, base)))
            for path in self.logs()
            for base in segment_bases(self.host, path)
        )

    def verify_log(self, path: str, progress: Callable[[int], None], *, ended: bool) -> Findings:
        """Check every byte of a log; `ended` if no broker runs."""
        reader = OfflineLogReader(self.host, path)
        try:
            return reader.verify_files(progress, ended=ended)
        finally:
            reader.close()

    def repair_log(
        self, path: str, progress: Callable[[int], None], *, lost_floor: int = 0, create: bool = False
    ) -> Findings:
        """Repair a log: copy damage to its quarantine and replace it by gaps; good batches stay where they are.

        Offsets below the floor that have no message become a gap. `create` the log if there are no files of it.
        """
        log = FileLog(self.host, path, create=create, owned=True, repair=True, progress=progress, lost_floor=lost_floor)
        log.close()
        return log.findings

    def partition_path(self, topic_id: int, number: int) -> str:
        """The directory of a partition, whether it is there or not."""
        return f"{self.path}/{TOPICS}/{topic_id}/{number}"

    def make_partition(self, path: str) -> None:
        """Make the directory of a partition that has none."""
        self._disk.make_directory(path, private=True)

    def log_extent(self, path: str) -> LogExtent | None:
        """The offsets of which a log has files, whether a writer is at work or not; None if it has none."""
        try:
            reader = OfflineLogReader(self.host, path)
        except LogNotFound:
            return None
        try:
            begin = reader.segments[0].base_offset if reader.segments else reader.next_offset
            first_offset, end = reader.first_offset, reader.next_offset
        finally:
            reader.close()
        if begin > first_offset:
            # Retention stores the new first offset before it removes segments: it may have done so in between.
            with suppress(LogNotFound):
                meta = read_meta(self.host, path)
                first_offset = begin if meta.is_reconstructed else meta.first_offset
        return LogExtent(first_offset, begin, end)

    def last_mark(self, path: str) -> int:
        """The highest mark of a transaction's batches in a log."""
        reader = OfflineLogReader(self.host, path)
        try:
            batches = reader.batches(reader.first_offset, skip_corrupt=True)
            return max((mark_of(batch.producer) for batch in batches if batch.producer_id == TRANSACTIONS), default=0)
        finally:
            reader.close()

    def staged(self) -> dict[int, int]:
        """The batches in the staging log: offsets to numbers of messages."""
        if not self._disk.names(self.staging_path):
            return {}
        reader = OfflineLogReader(self.host, self.staging_path)
        try:
            batches = reader.batches(reader.first_offset, skip_corrupt=True)
            return {batch.base_offset: batch.count for batch in batches if not batch.producer_id}
        finally:
            reader.close()


def _decoded(content: bytes, path: str) -> DataFormat | None:
    try:
        number = msgspec.msgpack.decode(content, type=list)[0]
        known = number in (FORMER_FORMAT, FORMAT)
        found = _format_decoder.decode(content) if known else None
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
        return None
    if found is None:
        raise UnsupportedFormat(
            f"{path} has format {number}, and this Headrace knows up to {FORMAT}; use the Headrace that wrote it",
            format=number,
        )
    if unknown := found.required & ~REQUIRED_KNOWN:
        raise UnsupportedFormat(
            f"{path} needs features that this Headrace does not know (bits {unknown:#x}); use the Headrace that wrote "
            "it, or a newer one",
            required=found.required,
        )
    return found
