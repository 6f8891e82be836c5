"""The copy of one shard on this node: restored, following, claimed, and followed again.

Everything here waits for the store and the disk: it runs on a worker thread, one call at a time.
"""

import logging
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from headrace.cluster.node_state import NodeState, read_state, seen_position, write_state
from headrace.model.errors import (
    CorruptFile,
    DiskFull,
    Fenced,
    InvalidArgument,
    LogNotFound,
    StoreWentBack,
    TooManyFiles,
)
from headrace.storage.disk import Disk
from headrace.storage.replicated.applier import Applier, OperationMismatch
from headrace.storage.replicated.checkpoint import NewPool
from headrace.storage.replicated.damage import damaged_ranges, is_segment
from headrace.storage.replicated.disk import ReplicatedDisk
from headrace.storage.replicated.epochs import StoredManifest, check_store, checkpoint_position, claim, read_manifest
from headrace.storage.replicated.following import FollowerBehind, ShardFollower
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.listing import CopyListing, found_lengths
from headrace.storage.replicated.log_size import LogSize
from headrace.storage.replicated.operations import OPERATIONS, WalHeader, decode_header, encode_object
from headrace.storage.replicated.restore import restore_newest
from headrace.storage.replicated.writer import WalWriter
from headrace.storage.stores.store import KeyExists, SharedStore

logger = logging.getLogger("headrace.cluster")

IN_DOUBT = (FollowerBehind, OperationMismatch, CorruptFile)
"""After these the directory is compared with the checkpoint."""
STORE_FAULTS = (CorruptFile, StoreWentBack)
"""The store lacks something that the copy needs, or has it damaged: no node can do anything about it."""
DISK_FAULTS = (OSError, DiskFull, LogNotFound, TooManyFiles)
"""Errors of the node's own disk, DiskFailed among them; those of a store are StoreUnavailable."""


_CHECK_S = 10.0
"""How often a follower looks whether all files of its copy are there."""
_DAMAGED_MAX = 4
"""A file that is found damaged as often, although it was compared with the store each time, is damaged there."""


class OwnedShard(NamedTuple):
    """A shard that this node has claimed, ready to be served."""

    epoch: int
    stored: StoredManifest
    """The manifest of the claim."""
    disk: ReplicatedDisk
    writer: WalWriter
    seals: dict[int, int]
    """The position of the seal of each earlier epoch."""
    log_size: LogSize
    """Of the log before this epoch."""
    begun_s: float = 0.0
    """When the manifest was asked for that confirms the epoch, by the node's own clock."""


class ShardPlace(NamedTuple):
    """Where the copy of a shard is, and under which names."""

    cluster: str
    node: str
    directory: str
    """The directory of the node."""
    shard: int = 0
    process: str = ""
    """The process of the node, as in its record."""

    @property
    def root(self) -> str:
        """The directory that is replicated."""
        return f"{self.directory}/shards/{self.shard:03d}"

    @property
    def trash(self) -> str:
        """The directory for files that were removed while a checkpoint reads them."""
        return f"{self.directory}/trash"


class ShardReplica:
    """The copy of a shard on this node's disk."""

    def __init__(
        self,
        store: SharedStore,
        disk: Disk,
        place: ShardPlace,
        *,
        now_us: Callable[[], int],
        clock: Callable[[], float],
        new_writer: Callable[..., WalWriter] = WalWriter,
        new_pool: NewPool = ThreadPoolExecutor,
    ) -> None:
        """`now_us` is the time of day, for WAL objects; `clock` measures durations in seconds.

        `new_writer` and `new_pool` make what has threads of its own: a simulation has others.
        """
        self.keys = ShardKeys(place.cluster, place.shard)
        self._store = store
        self._disk = disk
        self._place = place
        self._now_us = now_us
        self._clock = clock
        self._new_writer = new_writer
        self._new_pool = new_pool
        self._state = NodeState()
        self._applier: Applier | None = None
        self._follower: ShardFollower | None = None
        self._is_whole = False
        self.process_before = ""
        """The process that last used the directory, which has ended: the directory is locked."""
        self._known_damage: dict[str, list[range]] = {}
        """Damaged bytes of files that the store has just so, by their paths in the shard."""
        self._found_damaged: dict[str, int] = {}
        """How often each file was found damaged in this process."""
        self._to_scan: set[str] = set()
        """Files that were found damaged: when the copy was compared, what is still damaged is so in the store."""
        self.position = Position(0, 0)
        """How far the directory has the log; any thread may look."""
        self.seen = Position(0, 0)
        """The highest position that this node has seen."""
        self._checked_s = clock()
        """When all files were last found to be there."""
        self.problem = ""
        """Why the copy cannot get any further, which is a fault of the store; empty: it can."""

    def open(self) -> StoredManifest | None:
        """Check that the store has all that this node has seen, and go on where it stopped; returns the manifest."""
        self._disk.make_directory(self._place.directory, private=True)
        self._state = read_state(self._disk, self._place.directory)
        state = self._state
        if state.cluster not in ("", self._place.cluster):
            raise InvalidArgument(
                f"{self._place.directory} has data of the cluster {state.cluster}, not of {self._place.cluster}: "
                "give another directory"
            )
        self.process_before, self._is_whole = state.process, state.whole
        self.seen, self.position = seen_position(state), Position(*state.applied) if state.whole else Position(0, 0)
        found = check_store(self._store, self.keys, self.seen)
        if state.clean and state.boot and state.boot == self._disk.boot_id().hex():
            self._go_on(state, found)
        self.note_state(clean=False)
        return found

    def _go_on(self, state: NodeState, found: StoredManifest | None) -> None:
        """Follow from where the last process stopped in order, if nobody has touched its files since."""
        listing = CopyListing(found_lengths(self._disk, self._place.root))
        if listing.digest() != state.listing:
            return
        self._follow(
            Position(*state.applied), state.bindings, state.seals, LogSize(state.log_size), lengths=listing.lengths
        )
        if self._follower is not None and self._follower.is_behind(found):
            self._follower = None

    @property
    def is_restored(self) -> bool:
        """Whether the directory has the state of the shard at the position."""
        return self._follower is not None

    def restore(self) -> None:
        """Give the directory the state of the newest checkpoint, by comparison, and follow from there."""
        self.drop()
        self._disk.make_directory(self._place.directory, private=True)  # it may have been removed
        if self.seen > Position(1, 0) and self.manifest() is None:
            raise StoreWentBack(
                f"{self.keys.manifest} is missing, though this node has seen {self.seen}: put it back from a backup"
            )
        self._is_whole = False
        self.note_state(clean=False)
        self._disk.make_directory(f"{self._place.directory}/shards", private=True)
        follower = restore_newest(self._store, self.keys, self._disk, self._place.root, new_pool=self._new_pool)
        follower.seen = self.seen
        assert isinstance(follower.target, Applier)
        self._applier, self._follower = follower.target, follower
        self._note(follower.position)
        self._is_whole = True
        self.note_state(clean=False)

    def poll(self, limit: int) -> int:
        """Apply what has been committed since, at most so many objects; returns how many.

        Raises StoreUnavailable, those in STORE_FAULTS, after which it may be called again, and the others in IN_DOUBT,
        after which it must be restored.
        """
        assert self._follower is not None
        try:
            applied = self._follower.poll(limit)
        finally:  # also at a hole in the log
            self._note(self._follower.position)
        if applied < limit:
            self._learn_damage()
            self._check_files()
        return applied

    def _check_files(self) -> None:
        """Look from time to time whether all files are there, rather than when this copy is needed."""
        assert self._applier is not None
        if self._clock() - self._checked_s >= _CHECK_S:
            self._applier.check()
            self._checked_s = self._clock()

    def claim(
        self, nonce: str, addresses: tuple[str, ...], expected: int, on_fenced: Callable[[], None]
    ) -> OwnedShard | None:
        """Make the next epoch, end all earlier ones, and begin it; None if another node was first.

        After StoreUnavailable it is called again with the same nonce. Raises Fenced, those in STORE_FAULTS, before the
        epoch is made if they are known by then, and the others in IN_DOUBT, after which it is dropped and called
        again.
        """
        if self._follower is None:
            self.restore()
        assert self._follower is not None
        assert self._applier is not None
        self.poll(sys.maxsize)
        self._follower.check_end()  # who cannot get to the end takes the shard from nobody who can
        self._applier.check()  # nor who lacks files
        begun_s = self._clock()
        stored = claim(
            self._store, self.keys, node=self._place.node, addresses=addresses, nonce=nonce, expected=expected
        )
        if stored is None:
            return None
        epoch, secret = stored.manifest.epoch, bytes.fromhex(nonce)
        self._follower.seal_older(epoch, secret, self._now_us())
        self._note(self._follower.position)
        self._learn_damage()
        self._applier.check()
        self._begin_epoch(epoch, secret)
        seals, log_size = dict(self._follower.seals), self._follower.log_size
        lengths = self._applier.listing.lengths
        self.drop()
        writer = self._new_writer(
            self._store,
            self.keys,
            epoch,
            secret,
            now_us=self._now_us,
            clock=self._clock,
            position=1,
            on_fenced=on_fenced,
        )
        disk = ReplicatedDisk(self._disk, self._place.root, writer, trash=self._place.trash, lengths=lengths)
        disk.known_damage = self._known_damage
        return OwnedShard(epoch, stored, disk, writer, seals, log_size, begun_s)

    def _begin_epoch(self, epoch: int, nonce: bytes) -> None:
        """Put the first object of the epoch, which has no operations: from now on the epoch is begun for everybody."""
        key = self.keys.wal(epoch, 0)
        data = encode_object(WalHeader(OPERATIONS, epoch, 0, nonce, self._now_us()))
        try:
            self._store.put_new(key, data)
        except KeyExists:
            found = self._store.get(key)
            if found is None or decode_header(found.data).nonce != nonce:
                raise Fenced(f"another node has taken {key}") from None

    def follow_released(self, owned: OwnedShard) -> None:
        """Follow again behind an epoch that this node has released: the directory has all of it, if it is whole."""
        if owned.disk.damaged:
            self.note_damage(owned.disk.damaged)
            return
        owned.log_size.add(owned.writer.committed, owned.writer.statistics().bytes)
        self._follow(owned.writer.committed, {}, owned.seals, owned.log_size, lengths=owned.disk.lengths())

    def drop(self) -> None:
        """Forget how far the directory has the log: it is in doubt, or about to be changed by a broker."""
        if self._applier is not None:
            self._applier.close()
        self._applier = self._follower = None

    def drop_if_passed(self) -> None:
        """Have the copy restored if there is a checkpoint behind what it could not apply."""
        newest = checkpoint_of(self.manifest())
        if newest is not None and newest > self.position:
            self.drop()

    def note_damage(self, paths: Iterable[str]) -> None:
        """Have the copy compared with the store, as files of it were found damaged."""
        self.drop()
        for path in paths:
            self._found_damaged[path] = self._found_damaged.get(path, 0) + 1
            self._to_scan.add(path)

    def _learn_damage(self) -> None:
        """Look at the files that were found damaged before the copy was compared: the store has them so, too.

        What else is damaged in the same logs is learned at once.
        """
        while self._to_scan:
            found = self._to_scan.pop()
            folder = found.rpartition("/")[0]
            for name in self._disk.names(f"{self._place.root}/{folder}"):
                path = f"{folder}/{name}"
                if is_segment(path):
                    self._known_damage[path] = damaged_ranges(self._disk, f"{self._place.root}/{path}")
            if self._found_damaged[found] >= _DAMAGED_MAX:
                self._known_damage[found] = [range(sys.maxsize)]

    def note_state(self, *, clean: bool) -> None:
        """Write down how far this node is; with `clean`, that its directory can be trusted."""
        follower = self._follower
        trusted = clean and follower is not None and self._applier is not None
        self._state = NodeState(
            cluster=self._place.cluster,
            node=self._place.node,
            process=self._place.process,
            whole=self._is_whole,
            clean=trusted,
            boot=self._disk.boot_id().hex(),
            applied=tuple(self.position),  # type: ignore[arg-type]
            seen=tuple(self.seen),  # type: ignore[arg-type]
            bindings=self._applier.bindings if trusted and self._applier is not None else {},
            seals=dict(follower.seals) if trusted and follower is not None else {},
            log_size=follower.log_size.parts if trusted and follower is not None else [],
            listing=self._applier.listing.digest() if trusted and self._applier is not None else "",
        )
        write_state(self._disk, self._place.directory, self._state)

    def manifest(self) -> StoredManifest | None:
        """Read the manifest."""
        return read_manifest(self._store, self.keys)

    def note_committed(self, position: Position) -> None:
        """Remember what this node, as the owner, has committed."""
        self._note(position)

    def _follow(
        self,
        position: Position,
        bindings: dict[int, str],
        seals: dict[int, int],
        log_size: LogSize,
        *,
        lengths: dict[str, int],
    ) -> None:
        self._applier = Applier(self._disk, self._place.root, bindings, lengths)
        self._follower = ShardFollower(self._store, self.keys, self._applier, position, seals, self.seen, log_size)
        self._note(position)

    def _note(self, position: Position) -> None:
        self.position = position
        self.seen = max(self.seen, position)


def checkpoint_of(stored: StoredManifest | None) -> Position | None:
    """Where the newest checkpoint of a shard is; None if there is none."""
    if stored is None or not stored.manifest.checkpoint:
        return None
    return checkpoint_position(stored.manifest.checkpoint)
