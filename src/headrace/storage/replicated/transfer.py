"""Brings a plain data directory into a new cluster, and a cluster's state into a plain data directory."""

from collections.abc import Callable, Sequence

from headrace.model.errors import CorruptFile, InvalidArgument, StoreUnavailable
from headrace.storage.disk import Disk
from headrace.storage.replicated.checkpoint import (
    Checkpointer,
    DirectorySnapshot,
    MadeCheckpoint,
    Progress,
    fetch_chunk,
    load_checkpoint,
)
from headrace.storage.replicated.epochs import create_cluster, new_nonce, read_cluster, read_manifest
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.manifest import Manifest, encode_manifest
from headrace.storage.stores.store import KeyExists, SharedStore

NOT_REPLICATED = ("lock", "headrace.sock", "lost+found")
"""What a plain data directory has for the process that uses it."""
_EPOCH = 2
"""Of what is imported: a node that looked before has an empty copy of epoch 1, and must not go on from that."""
_ATTEMPTS = 5


def import_directory(
    disk: Disk,
    directory: str,
    store: SharedStore,
    cluster: str,
    now_us: int,
    progress: Progress | None = None,
    leave_out: Sequence[str] = NOT_REPLICATED,
) -> MadeCheckpoint:
    """Make a new cluster whose first checkpoint is a plain data directory, which nobody must use meanwhile.

    The cluster exists from the last step on, after every chunk was read back and compared: an import that is
    interrupted can be repeated. Raises InvalidArgument if there is such a cluster.
    """
    keys = ShardKeys(cluster, 0)
    _check_new(store, cluster, keys)
    if not disk.is_directory(directory):
        raise InvalidArgument(f"there is no directory {directory}")
    snapshot = DirectorySnapshot(disk, directory, Position(_EPOCH, 0), leave_out)
    total = sum(file.data_end for file in snapshot.files)
    tell = progress or (lambda _done, _total: None)
    made = Checkpointer(store, keys, _EPOCH, {1: 0}, keep_us=0).store_first(
        snapshot, now_us, lambda done, _: tell(done, 2 * total)
    )
    _compare(store, keys, made, lambda done: tell(total + done, 2 * total))
    _create(store, cluster, keys, made.name)
    return made


def _check_new(store: SharedStore, cluster: str, keys: ShardKeys) -> None:
    read_cluster(store, cluster)  # of a later format? A node that refused to begin may have made the record
    if read_manifest(store, keys) is not None:
        raise InvalidArgument(f"{store.location} has a cluster {cluster} already; give another name, or delete it")


def _compare(store: SharedStore, keys: ShardKeys, made: MadeCheckpoint, tell: Callable[[int], None]) -> None:
    """Read everything back from the store."""
    found = load_checkpoint(store, keys, made.name)
    if found != made.checkpoint:
        raise CorruptFile(f"{keys.checkpoint(made.name)} in {store.location} is not what was put there")
    done = 0
    for file in made.checkpoint.files:
        for _, length, chunk in file.spans():
            if fetch_chunk(store, keys, chunk) is None:
                raise CorruptFile(f"{keys.chunk(chunk.name)} in {store.location} is not there, though it was put")
            done += length
            tell(done)


def _create(store: SharedStore, cluster: str, keys: ShardKeys, name: str) -> None:
    """Let the cluster begin: released, in an epoch without objects, which the first claim seals."""
    manifest = Manifest(epoch=_EPOCH, owner="import", checkpoint=name, oldest=name, released=True, nonce=new_nonce())
    for attempt in range(_ATTEMPTS):
        try:
            store.put_new(keys.manifest, encode_manifest(manifest))
        except KeyExists:
            break
        except StoreUnavailable:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            break
    stored = read_manifest(store, keys)
    if stored is None or stored.manifest.nonce != manifest.nonce:
        raise InvalidArgument(f"cluster {cluster} was created by another while {name} was imported; nothing is changed")
    create_cluster(store, cluster)
