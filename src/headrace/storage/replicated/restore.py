"""Brings a directory to a state of a shard: the newest, or that of an earlier moment."""

from collections.abc import Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import NamedTuple

from headrace.model.errors import CorruptFile, InvalidArgument
from headrace.storage.disk import Disk, OpenFile
from headrace.storage.replicated.applier import Applier, FileBindings, OperationMismatch
from headrace.storage.replicated.checkpoint import NewPool, Progress, fetch_chunk, load_checkpoint
from headrace.storage.replicated.checkpoint_format import (
    Checkpoint,
    CheckpointFile,
    ChunkRef,
    digest_of,
    parse_checkpoint_name,
    path_text,
)
from headrace.storage.replicated.epochs import checkpoint_position, read_cluster, read_manifest
from headrace.storage.replicated.following import FollowerBehind, ShardFollower
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.listing import walk
from headrace.storage.replicated.manifest import Manifest
from headrace.storage.replicated.operations import (
    CreateFile,
    OpenExisting,
    Operation,
    Remove,
    RemoveDirectory,
    Rename,
    WalHeader,
    Write,
)
from headrace.storage.replicated.retention import list_steps
from headrace.storage.replicated.steps import perform
from headrace.storage.stores.store import SharedStore

_FETCHES = 8
_ATTEMPTS = 5


class ChunkGone(Exception):
    """A chunk is not in the store: its checkpoint was deleted meanwhile, or is not whole."""


class Restored(NamedTuple):
    """What a directory was brought to."""

    position: Position
    time_us: int
    """When the last change in it was made, by its owner's clock; 0 if there was none since the checkpoint."""


class DirectoryRestorer:
    """Brings a directory to the state of a checkpoint: fetches what differs, and removes what is too much."""

    def __init__(
        self,
        store: SharedStore,
        keys: ShardKeys,
        disk: Disk,
        root: str,
        progress: Progress | None,
        new_pool: NewPool = ThreadPoolExecutor,
    ) -> None:
        self._store = store
        self._keys = keys
        self._disk = disk
        self._root = root
        self._progress = progress or (lambda _done, _total: None)
        self._new_pool = new_pool
        self._done = self._total = 0
        self.fetched_bytes = 0
        """How much was not there, or differed."""

    def bring_to(self, checkpoint: Checkpoint) -> None:
        """Make the directory exactly that of a checkpoint; raises ChunkGone, and CorruptFile at a damaged chunk."""
        self._total, self._done = sum(file.data_end for file in checkpoint.files), 0
        directories = {path_text(path) for path in checkpoint.directories}
        self._remove_surplus(directories, {path_text(file.path) for file in checkpoint.files})
        for path in sorted(directories):
            self._disk.make_directory(f"{self._root}/{path}", sync=False, private=True)
        with self._new_pool(_FETCHES, "headrace-restore") as pool:
            under_way: list[Future[None]] = []
            try:
                for file in checkpoint.files:
                    self._restore_file(pool, file, under_way)
                for each in under_way:
                    each.result()
            finally:
                for each in under_way:
                    each.cancel()

    def empty(self) -> None:
        """Make the directory empty: the state before the first object."""
        self._remove_surplus(set(), set())

    def sync(self) -> None:
        """Return when the directory is on the disk: for one that is not a cache."""
        paths = list(walk(self._disk, self._root))
        for path, is_directory in paths:
            if is_directory:
                self._disk.sync_directory(f"{self._root}/{path}")
            else:
                self._disk.sync(self._disk.open(f"{self._root}/{path}", write=True))
        self._disk.sync_directory(self._root)

    def _remove_surplus(self, directories: set[str], files: set[str]) -> None:
        self._disk.make_directory(self._root, private=True)
        gone: list[str] = []
        for path, is_directory in list(walk(self._disk, self._root)):
            if any(path.startswith(f"{above}/") for above in gone[-1:]):
                continue
            if is_directory and path not in directories:
                self._disk.remove_directory(f"{self._root}/{path}")
                gone.append(path)
            elif not is_directory and path not in files:
                self._disk.remove(f"{self._root}/{path}", sync=False)

    def _restore_file(self, pool: Executor, file: CheckpointFile, under_way: list[Future[None]]) -> None:
        path = f"{self._root}/{path_text(file.path)}"
        opened = self._disk.open(path, write=True, create=not self._disk.exists(path))
        size = self._disk.size(opened)
        if size > file.data_end:
            self._disk.truncate(opened, file.data_end)
        for begin, length, chunk in file.spans():
            if digest_of(self._disk.read(opened, begin, length) if begin < size else b"") == chunk.digest:
                self._advance(length)
                continue
            under_way.append(pool.submit(self._fetch, opened, begin, length, chunk))
            while len(under_way) > 2 * _FETCHES:
                under_way.pop(0).result()
        if file.length > file.data_end:
            # The pieces below may still be on their way: they do not shorten the file.
            self._disk.truncate(opened, file.length)

    def _fetch(self, opened: OpenFile, begin: int, length: int, chunk: ChunkRef) -> None:
        data = fetch_chunk(self._store, self._keys, chunk)
        if data is None:
            raise ChunkGone(self._keys.chunk(chunk.name))
        if len(data) != length:
            raise CorruptFile(f"{self._keys.chunk(chunk.name)} has {len(data)} bytes, not {length}")
        self._disk.write(opened, begin, data)
        self.fetched_bytes += length
        self._advance(length)

    def _advance(self, length: int) -> None:
        self._done += length
        self._progress(self._done, self._total)


def restore_newest(
    store: SharedStore,
    keys: ShardKeys,
    disk: Disk,
    root: str,
    progress: Progress | None = None,
    new_pool: NewPool = ThreadPoolExecutor,
) -> ShardFollower:
    """Bring a directory to the newest checkpoint; the follower that is returned goes on from there.

    Whatever the directory holds is compared with the checkpoint, and only what differs is fetched. Raises CorruptFile
    if the store's copy is damaged, and StoreUnavailable.
    """
    restorer = DirectoryRestorer(store, keys, disk, root, progress, new_pool)
    for attempt in range(_ATTEMPTS):
        stored = read_manifest(store, keys)
        if stored is None or not stored.manifest.checkpoint:
            restorer.empty()
            return ShardFollower(store, keys, Applier(disk, root, lengths={}))
        # Checkpoints that follow each other quickly are deleted soon; those before are kept for longer.
        for name in usable_names(store, keys, stored.manifest)[::-1][: attempt + 1]:
            try:
                return _follow_checkpoint(store, keys, disk, root, name, restorer)
            except ChunkGone:
                continue
    raise CorruptFile(
        f"the newest checkpoint of {keys.root} in {store.location} is not whole: a chunk of it is missing; "
        "restore to an earlier moment with `headrace restore --at`"
    )


def usable_names(store: SharedStore, keys: ShardKeys, manifest: Manifest) -> list[str]:
    """The names of the checkpoints from which a restore may begin, in the order of their positions."""
    prefix = keys.checkpoint_prefix
    listed = [key.removeprefix(prefix) for key in perform(store, list_steps(prefix))]
    return [*(name for name in listed if manifest.oldest <= name < manifest.checkpoint), manifest.checkpoint]


def restore_at(
    store: SharedStore,
    cluster: str,
    shard: int,
    disk: Disk,
    directory: str,
    at: int | Position | None = None,
    progress: Progress | None = None,
) -> Restored:
    """Bring a new directory to the state of a shard at an earlier moment.

    :param at: a time in microseconds, a position, or None for the newest state.

    Raises InvalidArgument, with the earliest possible, if nothing that old is kept, and CorruptFile if something that
    is needed is damaged or missing.
    """
    if disk.names(directory):
        raise InvalidArgument(f"{directory} is not empty; give a directory that is new")
    keys = ShardKeys(cluster, shard)
    for _ in range(_ATTEMPTS):
        manifest = _existing_manifest(store, cluster, keys)
        try:
            return _restore_at(store, keys, disk, directory, manifest, at, progress)
        except (ChunkGone, FollowerBehind) as error:
            again = read_manifest(store, keys)
            if again is not None and again.manifest.oldest == manifest.oldest:
                raise CorruptFile(f"{keys.root} in {store.location} is not whole: {error} is missing") from error
    raise InvalidArgument(f"what {directory} needs is deleted while it is read; choose a later moment")


def _existing_manifest(store: SharedStore, cluster: str, keys: ShardKeys) -> Manifest:
    read_cluster(store, cluster)  # of a later format?
    stored = read_manifest(store, keys)
    if stored is None:
        raise InvalidArgument(f"{store.location} has no cluster {cluster}; check the name and the location")
    return stored.manifest


def _restore_at(
    store: SharedStore,
    keys: ShardKeys,
    disk: Disk,
    directory: str,
    manifest: Manifest,
    at: int | Position | None,
    progress: Progress | None,
) -> Restored:
    restorer = DirectoryRestorer(store, keys, disk, directory, progress)
    names = usable_names(store, keys, manifest) if manifest.checkpoint else []
    fitting = [name for name in names if _is_before(name, at)]
    if manifest.oldest and not fitting:
        first = parse_checkpoint_name(names[0])
        raise InvalidArgument(
            f"nothing that old is kept of {keys.root}: the earliest is {first.position}, "
            f"of {shown_moment(first.time_us)}",
            earliest=str(first.position),
        )
    time_us = 0
    if fitting:
        follower = _first_whole(store, keys, disk, directory, fitting, restorer)
        time_us = parse_checkpoint_name(fitting[-1]).time_us
    else:
        restorer.empty()
        follower = ShardFollower(store, keys, Applier(disk, directory, lengths={}))
    start = follower.position
    _follow_to(follower, manifest, at)
    restorer.sync()
    again = read_manifest(store, keys)
    if again is None or start < checkpoint_position(again.manifest.oldest):
        raise FollowerBehind(f"{start}")  # a seal may have been taken for another's that was deleted
    return Restored(follower.position, max(follower.time_us, time_us))


def first_with_file(store: SharedStore, keys: ShardKeys, path: str) -> Restored | None:
    """The first state in which this file was written; None if there is none, or the log does not show it any more."""
    watch = _FileWatch(path)
    follower = ShardFollower(store, keys, watch)
    try:
        while not watch.is_written:
            if not follower.poll(1):
                return None
    except (CorruptFile, FollowerBehind):
        return None  # nor can it be restored
    return Restored(follower.position, follower.time_us)


class _FileWatch:
    """Applies operations to nothing, and notices when one file is written."""

    def __init__(self, path: str) -> None:
        self.is_written = False
        self._path = path
        self._bindings = FileBindings()

    def apply(self, operations: Iterable[Operation]) -> None:
        """Look at the operations of an object."""
        for operation in operations:
            match operation:
                case CreateFile(file_id, path) | OpenExisting(file_id, path):
                    self._bindings.bind(file_id, path)
                case Rename(source, target):
                    self._bindings.rename(source, target)
                    self.is_written |= target == self._path
                case Remove(path):
                    self._bindings.remove(path)
                case RemoveDirectory(path):
                    self._bindings.remove_below(path)
                case Write(file_id):
                    self.is_written |= self._bindings.paths.get(file_id) == self._path

    def begin_epoch(self) -> None:
        """Forget the ids of files."""
        self._bindings = FileBindings()


def _is_before(name: str, at: int | Position | None) -> bool:
    parsed = parse_checkpoint_name(name)
    if at is None:
        return True
    return parsed.position <= at if isinstance(at, Position) else parsed.time_us <= at


def _first_whole(
    store: SharedStore, keys: ShardKeys, disk: Disk, root: str, names: list[str], restorer: DirectoryRestorer
) -> ShardFollower:
    """Restore the last of these checkpoints, or the last that is whole: that of a fenced owner may not be."""
    gone: ChunkGone | None = None
    for name in names[::-1]:
        try:
            return _follow_checkpoint(store, keys, disk, root, name, restorer)
        except ChunkGone as error:
            gone = gone or error
    assert gone is not None
    raise gone


def _follow_checkpoint(
    store: SharedStore, keys: ShardKeys, disk: Disk, root: str, name: str, restorer: DirectoryRestorer
) -> ShardFollower:
    checkpoint = load_checkpoint(store, keys, name)
    if checkpoint is None:
        raise ChunkGone(keys.checkpoint(name))
    if checkpoint.position != checkpoint_position(name):
        raise CorruptFile(f"{keys.checkpoint(name)} in {store.location} holds the checkpoint of {checkpoint.position}")
    restorer.bring_to(checkpoint)
    bindings = {file_id: path_text(path) for file_id, path in checkpoint.bindings.items()}
    lengths = {path_text(file.path): file.length for file in checkpoint.files}
    applier = Applier(disk, root, bindings, lengths)
    return ShardFollower(store, keys, applier, checkpoint.position, dict(checkpoint.seals))


def _follow_to(follower: ShardFollower, manifest: Manifest, at: int | Position | None) -> None:
    """Apply the log up to a moment, and make sure that what was applied is all there was."""

    def stop(header: WalHeader) -> bool:
        if isinstance(at, Position):
            return (header.epoch, header.position) >= at
        return at is not None and header.time_us > at

    is_stopped = False

    def noticed(header: WalHeader) -> bool:
        nonlocal is_stopped
        is_stopped = stop(header)
        return is_stopped

    end = at.epoch + 1 if isinstance(at, Position) else manifest.epoch + 1
    try:
        perform(follower.store, follower.poll_steps(end=end, stop=noticed))
    except OperationMismatch as error:
        raise CorruptFile(f"{follower.keys.root} cannot be replayed at {follower.position}: {error}") from error
    if isinstance(at, Position) and follower.position != at:
        sealed = follower.seals.get(at.epoch)
        if sealed is not None and at == (at.epoch, sealed):
            return
        follower.check_end()
        raise InvalidArgument(
            f"{follower.keys.root} has no position {at}: the log up to that epoch ends at "
            f"{follower.position}; `headrace restore --list` shows what can be restored"
        )
    if not is_stopped and not isinstance(at, Position) and follower.position.epoch < end:
        follower.check_end()


def shown_moment(time_us: int) -> str:
    """A time as people write it, exactly: an earlier moment may be before what happened then."""
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="microseconds")
