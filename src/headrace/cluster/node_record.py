"""The record in which a node says where it is and that it is alive, and what others make of it."""

import logging
from collections import Counter
from collections.abc import Iterable

import msgspec

from headrace.model.errors import LogInUse, StoreUnavailable
from headrace.storage.replicated.keys import Position, node_key, nodes_prefix
from headrace.storage.stores.store import KeyExists, SharedStore, VersionMismatch

logger = logging.getLogger("headrace.cluster")

SERVING, FOLLOWING, RESTORING, CLAIMING = "serving", "following", "restoring", "claiming"
RELEASING, STOPPED, SILENT = "releasing", "stopped", "silent"
BLOCKED = "blocked"
"""The store lacks something that the node's copy needs, or has it damaged."""
_ATTEMPTS = 5
_TOLD_MAX = 1000


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as it last said in the store."""

    node: str = ""
    process: str = ""
    """Random: another one in each process."""
    beat: int = 0
    """Counts the changes of the record: while it grows, the node is alive and reaches the store."""
    role: str = FOLLOWING
    addresses: tuple[str, ...] = ()
    """Where clients reach it: URLs of the native protocol."""
    http_addresses: tuple[str, ...] = ()
    version: str = ""
    format_max: int = 0
    """The highest format that it knows."""
    zone: str = ""
    epoch: int = 0
    objects: int = 0
    """How far it has applied the log, or committed it."""
    owns: int = 0
    """The epoch that it owns, or is making; 0: none."""
    drained: bool = False
    """Whether it was asked to serve nothing."""

    @property
    def position(self) -> Position:
        """How far it has applied the log."""
        return Position(self.epoch, self.objects)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(NodeRecord)


class UnreadableRecords:
    """Remembers which records could not be read, so that each is logged once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, key: str, error: Exception) -> None:
        """Log that a record was ignored, unless that was done before."""
        if key not in self._told and len(self._told) < _TOLD_MAX:
            self._told.add(key)
            logger.warning("node record cannot be read; ignored  key=%s reason=%s", key, error)


def decode_record(data: bytes, key: str, unreadable: UnreadableRecords | None = None) -> NodeRecord | None:
    """The record in these bytes; None, with a line in the log, if it cannot be read: a record is only a hint.

    Fields of later versions are ignored, and those that it lacks have their defaults. Its name is that of its key.
    """
    try:
        return msgspec.structs.replace(_decoder.decode(data), node=key.rpartition("/")[2])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        (unreadable or UnreadableRecords()).tell(key, error)
        return None


def read_record(
    store: SharedStore, cluster: str, node: str, unreadable: UnreadableRecords | None = None
) -> NodeRecord | None:
    """The record of one node; None if there is none, or it cannot be read."""
    key = node_key(cluster, node)
    found = store.get(key)
    return None if found is None else decode_record(found.data, key, unreadable)


def read_records(store: SharedStore, cluster: str, unreadable: UnreadableRecords | None = None) -> list[NodeRecord]:
    """The records of all nodes, by name; those that cannot be read are left out."""
    prefix = nodes_prefix(cluster)
    names = [key.removeprefix(prefix) for key in store.names(prefix)]
    found = (read_record(store, cluster, name, unreadable) for name in names)
    return [record for record in found if record is not None]


class NodeRecordWriter:
    """Replaces the record of this node. One thread uses it."""

    def __init__(self, store: SharedStore, cluster: str, node: str, process: str) -> None:
        self._store = store
        self._key = node_key(cluster, node)
        self._node = node
        self._process = process
        self._version = ""
        self._has_written = False
        self._unreadable = UnreadableRecords()

    def write(self, record: NodeRecord) -> None:
        """Replace the record; raises LogInUse if another process has the name of this node."""
        data = _encoder.encode(record)
        for _ in range(_ATTEMPTS):
            if not self._version:
                self._adopt(record)
            version, self._version = self._version, ""  # unknown, unless the store answers
            try:
                if version:
                    self._version = self._store.replace(self._key, data, version)
                else:
                    self._store.put_new(self._key, data)
            except (KeyExists, VersionMismatch):
                continue  # perhaps our own, from a request whose answer was lost
            self._has_written = True
            return
        raise StoreUnavailable(f"{self._key} was changed by others {_ATTEMPTS} times in a row")

    def _adopt(self, own: NodeRecord) -> None:
        """Learn the version that is in the store: that of an earlier process, or our own after a lost answer.

        Of two processes with the same name, the one that has been there for longer keeps it.
        """
        found = self._store.get(self._key)
        if found is None:
            self._version = ""
            return
        record = decode_record(found.data, self._key, self._unreadable) or NodeRecord()
        is_other = record.process != self._process and record.role != STOPPED and self._has_written
        if is_other and (record.beat, record.process) > (own.beat, own.process):
            raise LogInUse(
                f"another process has the name {self._node} in the cluster: give each node a name of its own (--node)"
            )
        self._version = found.version


class BeatWatch:
    """Remembers when each node's record was last seen to change, by this node's own clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[tuple[str, int], int]] = {}
        self._changes: Counter[str] = Counter()
        self.records: dict[str, NodeRecord] = {}
        """As they were last read."""

    def observe(self, node: str, record: NodeRecord | None, now_us: int) -> None:
        """Take a record as it was read at this time; None: there is none."""
        beat = ("", 0) if record is None else (record.process, record.beat)
        before = self._seen.get(node)
        if before is None or before[0] != beat:
            self._seen[node] = beat, now_us
            self._changes[node] += before is not None
        if record is None:
            self.records.pop(node, None)
        else:
            self.records[node] = record

    def observe_all(self, records: Iterable[NodeRecord], now_us: int) -> None:
        """Take the records of all nodes."""
        listed = {record.node: record for record in records}
        for node in self.records.keys() - listed.keys():
            self.observe(node, None, now_us)
        for node, record in listed.items():
            self.observe(node, record, now_us)

    def changed_us(self, node: str) -> int:
        """When the node's record was last seen to change; 0: it was never looked for."""
        seen = self._seen.get(node)
        return 0 if seen is None else seen[1]

    def has_changed(self, node: str) -> bool:
        """Whether the node's record has changed since it was first looked at: the node is alive."""
        return self._changes[node] > 0

    def live(self, now_us: int, age_us_max: int) -> list[NodeRecord]:
        """The nodes whose records have changed lately."""
        return [one for one in self.records.values() if now_us - self.changed_us(one.node) <= age_us_max]
