"""Brings data directories into clusters and out of them: import, export and restore, without a broker."""

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from headrace.model.errors import DataDirectoryDamaged, InvalidArgument, NotADataDirectory
from headrace.server.directory_lock import DirectoryLock
from headrace.storage.replicated.keys import NODE_STATE_NAME, SHARDS_NAME, Position, ShardKeys, definitions_key

if TYPE_CHECKING:
    from headrace.broker.repair import Verified
    from headrace.engines.api import DataDirectory
    from headrace.security.definitions import SecurityDefinitions
    from headrace.storage.disk import Disk
    from headrace.storage.replicated.restore import Restored
    from headrace.storage.stores.store import SharedStore

Progress = Callable[[int, int], None]
"""Called with the bytes that are done, and all bytes."""
_SHARD = f"{SHARDS_NAME}/000"
_NODE_NAMES = (SHARDS_NAME, NODE_STATE_NAME, "trash")
"""What a node has in its directory."""


class ClusterCopy(NamedTuple):
    """What was copied from a directory into a cluster, or from a cluster into a directory."""

    path: str
    cluster: str
    store: str
    position: Position
    time_us: int
    """When the last change in it was made; 0: not known."""
    files: int
    bytes: int
    definitions: bool
    """Whether there are security definitions in it."""
    origin: "NodeOrigin | None" = None
    """Of a directory that was imported: the node that it belongs to, if it is one's."""


class NodeOrigin(NamedTuple):
    """The node to which an imported directory belongs, and what it noted there."""

    node: str
    cluster: str
    position: Position
    """What was committed up to here is in the directory."""
    clean: bool
    """Whether the node stopped in order: nothing else is in it."""


class ImportSource(NamedTuple):
    """A directory to import, which is locked."""

    path: str
    origin: NodeOrigin | None
    """None: it is a plain broker's."""


class RestorePoint(NamedTuple):
    """A state of a cluster that can be restored: the beginning, a checkpoint, or the end of the log."""

    what: str
    position: Position
    time_us: int


def import_directory(
    path: str,
    store_url: str,
    cluster: str,
    credentials_file: str,
    progress: Progress,
    *,
    verifying: Progress = lambda _done, _total: None,
    damaged: bool = False,
) -> ClusterCopy:
    """Make a new cluster of the data directory of a broker, or of a node whose store is lost.

    Nobody may be at work in it. It does not change. Unless it may be `damaged`, all of it is verified first.
    """
    from headrace.cluster.definitions import SharedDefinitions
    from headrace.server.cluster_settings import check_name
    from headrace.storage.disk import PrivateDisk
    from headrace.storage.replicated.epochs import read_manifest
    from headrace.storage.replicated.transfer import NOT_REPLICATED
    from headrace.storage.replicated.transfer import import_directory as store_directory

    check_name(cluster)
    disk = PrivateDisk()
    with _checked_store(store_url, cluster, credentials_file) as store, _locked(disk, path) as source:
        document = _definitions_of(source)
        if read_manifest(store, ShardKeys(cluster, 0)) is not None:
            raise InvalidArgument(f"{store.location} has a cluster {cluster} already; give another name")
        if not damaged:
            _check_undamaged(source, verifying)
        store.delete([definitions_key(cluster)])  # those of an import that was interrupted
        if document.version:
            SharedDefinitions(store, cluster).seed(document)
        leave_out = (*NOT_REPLICATED, *_NODE_NAMES)
        made = store_directory(disk, source.path, store, cluster, time.time_ns() // 1000, progress, leave_out)
        files = made.checkpoint.files
        position = Position(made.checkpoint.epoch, made.checkpoint.objects)
        length = sum(file.length for file in files)
        definitions, origin = bool(document.version), source.origin
        return ClusterCopy(path, cluster, store.location, position, 0, len(files), length, definitions, origin)


def restore_directory(
    path: str, store_url: str, cluster: str, credentials_file: str, at: int | Position | None, progress: Progress
) -> ClusterCopy:
    """Copy the state of a cluster at a time or a position into a new data directory; None: the newest state."""
    from headrace.server.directory_copy import whole_copy
    from headrace.storage.disk import PrivateDisk
    from headrace.storage.replicated.restore import restore_at

    disk = PrivateDisk()
    with whole_copy(disk, path) as content, _opened_store(store_url, credentials_file) as store:
        done = restore_at(store, cluster, 0, disk, content, at, progress)
        if not _is_begun(disk, content):
            raise _no_data(store, ShardKeys(cluster, 0))
    document = _definitions_of(ImportSource(path, None))
    sizes = [os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names]
    return ClusterCopy(
        path, cluster, store.location, done.position, done.time_us, len(sizes), sum(sizes), bool(document.version)
    )


def _is_begun(disk: "Disk", path: str) -> bool:
    """Whether a broker has begun to use a directory: it writes the format file before any other."""
    from headrace.engines.api import FORMAT_NAME
    from headrace.storage.record import SlottedRecord

    path = os.path.join(path, FORMAT_NAME)
    return disk.exists(path) and SlottedRecord(disk, path, write=False).load() is not None


def _beginning(store: "SharedStore", keys: ShardKeys) -> "Restored | None":
    """The first state of a cluster that a broker can serve, if the log is kept from there on."""
    from headrace.engines.api import FORMAT_NAME
    from headrace.storage.replicated.restore import first_with_file

    return first_with_file(store, keys, FORMAT_NAME)


def _no_data(store: "SharedStore", keys: ShardKeys) -> InvalidArgument:
    from headrace.storage.replicated.restore import shown_moment

    began = _beginning(store, keys)
    if began is None:
        return InvalidArgument(f"{keys.root} has no data yet: no node has served it")
    return InvalidArgument(
        f"{keys.root} had no data yet at that moment: it begins at {began.position} of {shown_moment(began.time_us)}",
        earliest=str(began.position),
    )


def list_restorable(store_url: str, cluster: str, credentials_file: str) -> list[RestorePoint]:
    """The checkpoints that are kept of a cluster, oldest first, and the end of its log: every moment between."""
    from headrace.storage.replicated.checkpoint_format import parse_checkpoint_name
    from headrace.storage.replicated.epochs import read_manifest
    from headrace.storage.replicated.restore import usable_names

    with _opened_store(store_url, credentials_file) as store:
        keys = ShardKeys(cluster, 0)
        stored = read_manifest(store, keys)
        if stored is None:
            raise InvalidArgument(f"{store.location} has no cluster {cluster}; check the name and the location")
        names = usable_names(store, keys, stored.manifest) if stored.manifest.checkpoint else []
        parsed = [parse_checkpoint_name(name) for name in names]
        points = [RestorePoint("checkpoint", one.position, one.time_us) for one in parsed]
        began = None if stored.manifest.oldest else _beginning(store, keys)  # else the first objects may be deleted
        if began is not None:
            points.insert(0, RestorePoint("beginning", *began))
        return [*points, _end_of_log(store, keys, stored.manifest.epoch)]


def _end_of_log(store: "SharedStore", keys: ShardKeys, epoch: int) -> RestorePoint:
    """The last WAL object of the current epoch; while the cluster runs, more follow."""
    from headrace.storage.replicated.operations import decode_object

    last = ""
    while names := store.names(keys.epoch_prefix(epoch), last):
        last = names[-1]
    found = store.get(last) if last else None
    if found is None:
        return RestorePoint("newest", Position(epoch, 0), 0)
    header, _ = decode_object(found.data)
    return RestorePoint("newest", Position(epoch, keys.position(last)[1] + 1), header.time_us)


def _definitions_of(source: ImportSource) -> "SecurityDefinitions":
    """The security definitions in the journal of a data directory, which must be sound."""
    from headrace.broker.inspection import inspect

    with _data_of(source) as data:
        found = inspect(data)
    if found.problems or found.state is None:
        first = found.problems[0]
        raise DataDirectoryDamaged(
            f"{source.path} is damaged ({first.path}: {first.problem}); {_repair_text(source)}", path=source.path
        )
    return found.state.definitions.document


def _check_undamaged(source: ImportSource, verifying: Progress) -> None:
    """Raise DataDirectoryDamaged if anything is damaged or missing, but bytes that were being written at the end."""
    from headrace.broker.repair import verify

    with _data_of(source) as data:
        total = data.size_bytes()
        found = list(_damage_in(verify(data, lambda done: verifying(done, total), running=False)))
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise DataDirectoryDamaged(
            f"{source.path} is damaged: {found[0]}{more}; {_repair_text(source)}. `--damaged` imports it as it is: "
            "what is damaged then is damaged in the cluster",
            path=source.path,
        )


def _damage_in(found: "Verified") -> Iterator[str]:
    """What is damaged or missing. A broker that was killed leaves torn bytes at the end of logs: those are not it."""
    yield from (f"{one.path}: {one.problem}" for one in found.problems)
    for log in found.logs:
        if log.error:
            yield f"{log.path}: {log.error}"
        for lost in log.findings.lost:
            if not lost.repaired:
                yield f"offsets {lost.first_offset} to {lost.next_offset - 1} in {lost.path}: {lost.reason}"
        yield from (f"the header of {path}" for path in log.findings.headers)
        if log.findings.record:
            yield f"the record {log.findings.record}"
    for one in found.missing:
        yield f"offsets {one.first_offset} to {one.next_offset - 1} of {one.path} are missing: {one.reason}"


def _repair_text(source: ImportSource) -> str:
    """What to do about damage in a directory that is to be imported."""
    if source.origin is None:
        return f"`headrace verify {source.path}` lists all of it, `headrace repair {source.path}` puts it in order"
    return (
        f"import the directory of another node, or copy {source.path} elsewhere: `headrace verify` lists all damage in "
        "the copy, and `headrace repair` puts it in order; then import the copy"
    )


@contextmanager
def _data_of(source: ImportSource) -> Iterator["DataDirectory"]:
    from headrace.engines.api import DataDirectory
    from headrace.storage.runtime import StorageRuntime

    host = StorageRuntime()
    try:
        data = DataDirectory(host, source.path, is_node_copy=source.origin is not None)
        data.check_used()
        yield data
    finally:
        host.close()


def check_no_broker(disk: "Disk", path: str) -> None:
    """Raise InvalidArgument if a directory has the data of a plain broker, which a node would neither use nor touch."""
    if _holds_broker(disk, path):
        raise InvalidArgument(
            f"{path} has the data of a broker that is not a node; `headrace cluster import {path}` brings it into a "
            "cluster, then give the node another directory"
        )


def _holds_broker(disk: "Disk", path: str) -> bool:
    from headrace.engines.api import DataDirectory
    from headrace.storage.runtime import StorageRuntime

    host = StorageRuntime(disk)
    try:
        data = DataDirectory(host, path)
        data.check_finished()
        data.check_no_node_copy()
        return disk.exists(data.format_path) or data.was_used()
    finally:
        host.close()


@contextmanager
def _locked(disk: "Disk", path: str) -> Iterator[ImportSource]:
    """Keep brokers and nodes out of a directory to import; raises LogInUse if one is at work."""
    source = _import_source(disk, path)
    lock = DirectoryLock(disk, path)
    try:
        yield source
    finally:
        lock.release()


def _import_source(disk: "Disk", path: str) -> ImportSource:
    """What is to be imported of a directory: all of a plain broker's, the copy of the shard of a node's."""
    from headrace.cluster.node_state import read_state

    if _holds_broker(disk, path):
        return ImportSource(path, None)
    if not os.path.isdir(os.path.join(path, _SHARD)):
        raise NotADataDirectory(f"{path} is not a broker's data directory: there is nothing of a broker's in it")
    state = read_state(disk, path)
    if not state.whole:
        raise InvalidArgument(
            f"{path} has only a part of the data of cluster {state.cluster}: the node had not fetched all of it from "
            "the store when it stopped; import the directory of another node"
        )
    origin = NodeOrigin(state.node, state.cluster, Position(*state.applied), state.clean)
    return ImportSource(os.path.join(path, _SHARD), origin)


@contextmanager
def _opened_store(url: str, credentials_file: str) -> Iterator["SharedStore"]:
    from headrace.cluster.store_list import open_store

    store = open_store(url, credentials_file=credentials_file or None)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _checked_store(url: str, cluster: str, credentials_file: str) -> Iterator["SharedStore"]:
    """A store that keeps the promises that a cluster needs; raises StoreUnqualified for others."""
    from headrace.storage.stores.self_test import qualify_store

    with _opened_store(url, credentials_file) as store:
        qualify_store(store, cluster, secrets.token_hex(8))
        yield store
