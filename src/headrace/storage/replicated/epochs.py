"""Epochs of a shard: the cluster's record, the manifest, claims, and the check that the store did not go back.

Every function here is safe against lost, late and doubled requests. Functions that end in `_steps` are the protocols;
those without call the store.
"""

import secrets
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from headrace.model.errors import CorruptFile, Fenced, StoreUnavailable, StoreWentBack, UnsupportedFormat
from headrace.storage.replicated.keys import Position, ShardKeys, cluster_key
from headrace.storage.replicated.manifest import FORMAT, Manifest, decode_manifest, encode_manifest
from headrace.storage.replicated.steps import GetObject, ListNames, PutNew, ReplaceObject, Steps, perform
from headrace.storage.stores.store import KeyExists, SharedStore, VersionMismatch

_ATTEMPTS = 5
"""How often a change is tried whose answers are lost, before StoreUnavailable goes to the caller."""


class ClusterRecord(msgspec.Struct, frozen=True):
    """What is decided about a cluster when it is created, and never changes."""

    shards: int
    format: int = FORMAT


_decoder = msgspec.json.Decoder(ClusterRecord)


class StoredManifest(NamedTuple):
    """A manifest as it was read, with the version that `replace` needs."""

    manifest: Manifest
    version: str


def new_nonce() -> str:
    """A random text of 32 hexadecimal digits: one for each claim, whose 16 bytes are also in its WAL objects."""
    return secrets.token_hex(16)


def read_cluster(store: SharedStore, cluster: str) -> ClusterRecord | None:
    """The record of a cluster; None if there is no such cluster. Raises UnsupportedFormat if it is of a later one."""
    found = store.get(cluster_key(cluster))
    if found is None:
        return None
    try:
        record = _decoder.decode(found.data)
    except msgspec.MsgspecError as error:
        raise CorruptFile(f"the record of cluster {cluster} cannot be read: {error}") from error
    if record.format > FORMAT:
        raise UnsupportedFormat(
            f"cluster {cluster} has format {record.format}, this Headrace knows format {FORMAT}; install a newer one"
        )
    return record


def create_cluster(store: SharedStore, cluster: str, shards: int = 1) -> ClusterRecord:
    """Create a cluster, or join the one there is; raises UnsupportedFormat if that has another number of shards."""
    for _ in range(_ATTEMPTS):
        record = read_cluster(store, cluster)
        if record is not None:
            if record.shards != shards:
                raise UnsupportedFormat(
                    f"cluster {cluster} has {record.shards} shards, not {shards}; the number cannot be changed"
                )
            return record
        try:
            store.put_new(cluster_key(cluster), msgspec.json.encode(ClusterRecord(shards)))
        except KeyExists:
            continue
    raise StoreUnavailable(f"the record of cluster {cluster} is neither there nor can it be created")


def read_manifest_steps(keys: ShardKeys) -> Steps[StoredManifest | None]:
    """Read the manifest; None before the first claim."""
    found = yield GetObject(keys.manifest)
    if found is None:
        return None
    try:
        return StoredManifest(decode_manifest(found.data), found.version)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptFile(
            f"{keys.manifest} cannot be read: {error}; put it back from a backup of the store", key=keys.manifest
        ) from error


def read_manifest(store: SharedStore, keys: ShardKeys) -> StoredManifest | None:
    """The manifest of a shard; None before the first claim."""
    return perform(store, read_manifest_steps(keys))


def claim_steps(
    keys: ShardKeys, *, node: str, addresses: tuple[str, ...], nonce: str, expected: int | None = None
) -> Steps[StoredManifest | None]:
    """Make the next epoch of a shard; the result is None if another node has made one meanwhile.

    `expected` is the epoch that the claimant knows of (0: none): if there is a later one it does not claim. After
    StoreUnavailable the claimant calls again with the same nonce, and recognises a claim whose answer was lost. Raises
    StoreWentBack where there is no manifest, and there was one.
    """
    for attempt in range(_ATTEMPTS):
        found = yield from read_manifest_steps(keys)
        if found is not None and found.manifest.nonce == nonce:
            return found
        if found is None and (yield from _was_there_steps(keys, expected or 0)):
            continue
        before = Manifest(epoch=0) if found is None else found.manifest
        if before.format > FORMAT:
            raise UnsupportedFormat(
                f"{keys.root} has format {before.format}, this Headrace knows format {FORMAT}; install a newer one"
            )
        if expected is not None and before.epoch != expected:
            return None
        expected = before.epoch
        after = msgspec.structs.replace(
            before,
            epoch=before.epoch + 1,
            owner=node,
            addresses=addresses,
            released=False,
            successor="",
            change=before.change + 1,
            nonce=nonce,
        )
        try:
            if found is None:
                yield PutNew(keys.manifest, encode_manifest(after))
            else:
                yield ReplaceObject(keys.manifest, encode_manifest(after), found.version)
        except (KeyExists, VersionMismatch):
            continue  # it may be our own, from a request whose answer was lost
        except StoreUnavailable:
            if attempt == _ATTEMPTS - 1:
                raise
    return None


def _was_there_steps(keys: ShardKeys, expected: int) -> Steps[bool]:
    """Of a shard without a manifest: raise StoreWentBack if it had one; the result is whether it has one now."""
    proof = f"epoch {expected} was seen" if expected else ""
    for prefix in (keys.wal_prefix, keys.checkpoint_prefix, keys.chunk_prefix):
        if not proof and (names := (yield ListNames(prefix, "", 1))):
            proof = f"there is {names[0]}"
    if not proof:
        return False
    if (yield GetObject(keys.manifest)) is not None:  # another node was faster
        return True
    raise StoreWentBack(
        f"{keys.manifest} is missing, though {proof}: put it back from a backup of the store. Where {keys.root} is "
        "only what an import has stored that was interrupted, run that again, or delete it"
    )


def claim(
    store: SharedStore,
    keys: ShardKeys,
    *,
    node: str,
    addresses: tuple[str, ...],
    nonce: str,
    expected: int | None = None,
) -> StoredManifest | None:
    """Make the next epoch of a shard; None if another node has made one meanwhile. See `claim_steps`."""
    return perform(store, claim_steps(keys, node=node, addresses=addresses, nonce=nonce, expected=expected))


def change_steps(keys: ShardKeys, epoch: int, nonce: str, change: Callable[[Manifest], Manifest]) -> Steps[Manifest]:
    """Change the manifest as the owner of an epoch; raises Fenced when another epoch has begun.

    The nonce is another one for each change, so that the owner recognises one whose answer was lost.
    """
    for attempt in range(_ATTEMPTS):
        found = yield from read_manifest_steps(keys)
        if found is None:
            raise StoreWentBack(f"{keys.manifest} is gone, though this node owns epoch {epoch}")
        before = found.manifest
        if before.nonce == nonce:
            return before
        if before.epoch < epoch:
            raise StoreWentBack(f"{keys.manifest} is at epoch {before.epoch}, though this node owns epoch {epoch}")
        if before.epoch > epoch:
            raise Fenced(f"{before.owner} has claimed the shard with epoch {before.epoch}", epoch=before.epoch)
        after = msgspec.structs.replace(change(before), change=before.change + 1, nonce=nonce)
        try:
            yield ReplaceObject(keys.manifest, encode_manifest(after), found.version)
        except VersionMismatch:
            continue
        except StoreUnavailable:
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        return after
    raise StoreUnavailable(f"{keys.manifest} was changed by others {_ATTEMPTS} times in a row")


def release(store: SharedStore, keys: ShardKeys, epoch: int, successor: str = "") -> Manifest:
    """Mark a shard as released by its owner, after its last WAL object was stored; raises Fenced."""

    def released(before: Manifest) -> Manifest:
        return msgspec.structs.replace(before, released=True, successor=successor)

    return perform(store, change_steps(keys, epoch, new_nonce(), released))


def set_checkpoint_steps(keys: ShardKeys, epoch: int, nonce: str, name: str, oldest: str) -> Steps[Manifest]:
    """Make a checkpoint, which is stored with all its chunks, the one to restore from; raises Fenced.

    `oldest` is the first that is kept: what is before it may be deleted from now on, and not earlier.
    """

    def with_checkpoint(before: Manifest) -> Manifest:
        return msgspec.structs.replace(before, checkpoint=name, oldest=oldest)

    return change_steps(keys, epoch, nonce, with_checkpoint)


def set_checkpoint(store: SharedStore, keys: ShardKeys, epoch: int, name: str, oldest: str) -> Manifest:
    """Make a checkpoint the one to restore from, and say which is the first that is kept; raises Fenced."""
    return perform(store, set_checkpoint_steps(keys, epoch, new_nonce(), name, oldest))


def set_format(store: SharedStore, keys: ShardKeys, epoch: int, format: int) -> Manifest:
    """Allow the owner to write a later format, which nodes that do not know it never claim; raises Fenced."""

    def with_format(before: Manifest) -> Manifest:
        return msgspec.structs.replace(before, format=max(before.format, format))

    return perform(store, change_steps(keys, epoch, new_nonce(), with_format))


def checkpoint_position(name: str) -> Position:
    """The position in the name of a checkpoint; the beginning of the log for no checkpoint.

    >>> checkpoint_position("00000003-000000000042-1700000000000000-5f0c9a1e")
    Position(epoch=3, objects=42)
    """
    if not name:
        return Position(1, 0)
    epoch, objects = name.split("-")[:2]
    return Position(int(epoch), int(objects))


def check_store_steps(keys: ShardKeys, seen: Position) -> Steps[StoredManifest | None]:
    """Read the manifest, and raise StoreWentBack if the store lacks what this node has seen to be committed.

    `seen` is the highest position that this node saw, (0, 0) for none. That object is there still, or before the
    oldest checkpoint, or the store was set back, such as by a restore from a backup.
    """
    found = yield from read_manifest_steps(keys)
    if seen <= Position(1, 0):  # the beginning, before the first claim
        return found
    at = f"{keys.root} was at {seen} when this node last saw it"
    if found is None or found.manifest.epoch < seen.epoch:
        now = "has no manifest" if found is None else f"is at epoch {found.manifest.epoch}"
        raise StoreWentBack(f"{at}, and {now} now", seen=str(seen))
    if seen.objects and checkpoint_position(found.manifest.oldest) < seen:
        last = yield GetObject(keys.wal(seen.epoch, seen.objects - 1))
        if last is None:
            again = yield from read_manifest_steps(keys)  # it may have been deleted meanwhile
            if again is None or checkpoint_position(again.manifest.oldest) < seen:
                raise StoreWentBack(f"{at}, and lacks that object now", seen=str(seen))
    return found


def check_store(store: SharedStore, keys: ShardKeys, seen: Position) -> StoredManifest | None:
    """Read the manifest, and raise StoreWentBack if the store lacks what this node has seen to be committed."""
    return perform(store, check_store_steps(keys, seen))
