"""Checkpoints: the owner of a shard stores its files, so that the log before them need not be replayed or kept.

Uploads are safe without any lock. The name of a chunk is its hash and the upload that made it, so no name is ever used
twice; a checkpoint refers only to chunks of the checkpoint before it and to those that the same owner uploaded. A chunk
that no kept checkpoint needs can therefore never be needed again, and a request to delete it may arrive at any time.
ADR 69 has the argument in full.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from headrace.model.errors import CorruptFile, Fenced, StoreUnavailable
from headrace.storage.disk import Disk
from headrace.storage.replicated.checkpoint_format import (
    CHUNK_BYTES,
    Checkpoint,
    CheckpointFile,
    CheckpointName,
    ChunkRef,
    decode_checkpoint,
    decode_files,
    digest_of,
    encode_checkpoint,
    encode_files,
    parse_checkpoint_name,
    path_bytes,
)
from headrace.storage.replicated.checkpoint_verifier import CheckpointVerifier
from headrace.storage.replicated.disk import ReplicatedDisk
from headrace.storage.replicated.epochs import (
    checkpoint_position,
    new_nonce,
    read_manifest,
    read_manifest_steps,
    set_checkpoint,
)
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.listing import walk
from headrace.storage.replicated.retention import (
    choose_kept,
    collect_checkpoints_steps,
    collect_chunks_steps,
    collect_wal_steps,
    is_outdated,
    list_chunks_steps,
    list_steps,
)
from headrace.storage.replicated.snapshot import F, ShardSnapshot, SnapshotFile
from headrace.storage.replicated.steps import Steps, perform
from headrace.storage.stores.store import KeyExists, SharedStore

_UPLOADS = 4
_ATTEMPTS = 3
_FILES_BYTES_MAX = 8 << 20
"""A longer list of files is stored as chunks of its own."""

Progress = Callable[[int, int], None]
"""Is told how many bytes are done, and of how many."""
NewPool = Callable[[int, str], Executor]
"""Makes what transfers chunks: so many threads, with names that begin so."""


class StillFile(NamedTuple):
    """A file that nobody changes."""

    path: str
    length: int
    data_end: int
    """There are zeros from here to the length."""
    is_overwritten: bool = False
    is_torn: bool = False
    identity: object = None


class MadeCheckpoint(NamedTuple):
    """A checkpoint that is stored."""

    name: str
    checkpoint: Checkpoint
    uploaded_bytes: int


class DirectorySnapshot:
    """A directory that nobody changes, as a snapshot."""

    def __init__(self, disk: Disk, root: str, position: Position, leave_out: Sequence[str] = ()) -> None:
        self._disk = disk
        self._root = root
        self.position = position
        self.bindings: Mapping[int, str] = {}
        self.directories: list[str] = []
        self.files: list[StillFile] = []
        for path, is_directory in walk(disk, root):
            if path.split("/")[0] in leave_out:
                continue
            if is_directory:
                self.directories.append(path)
            else:
                size = disk.size(disk.open(f"{root}/{path}"))
                self.files.append(StillFile(path, size, size))

    def read(self, file: StillFile, position: int, length: int) -> bytes:
        """Bytes of a file."""
        return self._disk.read(self._disk.open(f"{self._root}/{file.path}"), position, length)

    def report_damage(self, file: StillFile, position: int, reason: str) -> None:
        """Take the damage over: there is no other copy."""


def load_checkpoint(store: SharedStore, keys: ShardKeys, name: str) -> Checkpoint | None:
    """Read a checkpoint; None if it, or a part of it, is not there any more. Raises CorruptFile if it is damaged."""
    found = store.get(keys.checkpoint(name))
    if found is None:
        return None
    checkpoint = decode_checkpoint(found.data, keys.checkpoint(name))
    if not checkpoint.parts:
        return checkpoint
    data = [fetch_chunk(store, keys, part) for part in checkpoint.parts]
    if None in data:
        return None
    files = decode_files(b"".join(part for part in data if part is not None))
    return msgspec.structs.replace(checkpoint, files=files)


def fetch_chunk(store: SharedStore, keys: ShardKeys, chunk: ChunkRef) -> bytes | None:
    """Read a chunk; None if it is not there. Raises CorruptFile if it is damaged."""
    key = keys.chunk(chunk.name)
    found = store.get(key)
    if found is None:
        return None
    if digest_of(found.data) != chunk.digest:
        raise CorruptFile(
            f"{key} in {store.location} is damaged: its content has another hash than its name says", key=key
        )
    return found.data


class ChunkUploader:
    """Uploads the chunks of one owner, each content once."""

    def __init__(self, store: SharedStore, keys: ShardKeys, epoch: int) -> None:
        self._store = store
        self._keys = keys
        self._epoch = epoch
        self.known: dict[bytes, ChunkRef] = {}
        """Chunks that may be referred to, by their hash: of the checkpoint before, and those uploaded since."""
        self.uploaded_bytes = 0

    def add(self, pool: Executor, data: bytes, upload: str) -> "Future[ChunkRef] | ChunkRef":
        """Upload a chunk unless it is there already; the result is its reference, at once or later."""
        digest = digest_of(data)
        found = self.known.get(digest)
        return found if found is not None else pool.submit(self._put, data, digest, upload)

    def _put(self, data: bytes, digest: bytes, upload: str) -> ChunkRef:
        chunk = ChunkRef(digest, f"{self._epoch:08d}-{upload}")
        put_own(self._store, self._keys.chunk(chunk.name), data)
        self.known[digest] = chunk
        self.uploaded_bytes += len(data)
        return chunk


def put_own(store: SharedStore, key: str, data: bytes) -> None:
    """Put an object under a name that nobody else uses; one that is there is from a request whose answer was lost."""
    for attempt in range(_ATTEMPTS):
        try:
            store.put_new(key, data)
        except KeyExists:
            return
        except StoreUnavailable:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return


class Checkpointer:
    """Makes the checkpoints of one owner in one epoch, and deletes what they make superfluous. One thread at a time."""

    def __init__(
        self,
        store: SharedStore,
        keys: ShardKeys,
        epoch: int,
        seals: Mapping[int, int],
        *,
        keep_us: int,
        new_pool: NewPool = ThreadPoolExecutor,
    ) -> None:
        """Begin in an epoch that this node has claimed.

        :param seals: the seal of every earlier epoch, as the follower that claimed has seen them.
        :param keep_us: for how long checkpoints and WAL objects are kept as a backup.
        """
        self._store = store
        self._keys = keys
        self._epoch = epoch
        self._seals = dict(seals)
        self._keep_us = keep_us
        self._new_pool = new_pool
        self._uploader = ChunkUploader(store, keys, epoch)
        self._kept: dict[str, set[str]] = {}
        """The checkpoints that are kept, in order, with the chunks that they need."""
        self._last: dict[object, CheckpointFile] = {}
        """Files of the last checkpoint that were only appended to in this epoch."""
        self._verifier = CheckpointVerifier()
        self.missing_chunks = 0
        """How many chunks of the newest checkpoint the last `collect` did not find: nobody can be restored from it."""
        self._is_from_start = True
        """Whether the log is kept from its beginning, which is not long ago, so that no checkpoint leads to it."""
        self._time_us = 0
        self._is_ready = False

    def make(
        self,
        snapshot: ShardSnapshot[F],
        now_us: int,
        wait_committed: Callable[[], None] = lambda: None,
        progress: Progress | None = None,
    ) -> MadeCheckpoint:
        """Store a checkpoint with all chunks that are not in the store yet, and put it into the manifest.

        `wait_committed` returns when all objects before the snapshot's position are committed. Raises Fenced, and
        StoreUnavailable, after which another attempt uploads only the rest.
        """
        self._begin()
        made = self._store_checkpoint(snapshot, now_us, wait_committed, progress or _silent)
        names = choose_kept([*self._kept, made.name], self._time_us, self._keep_us)
        is_from_start = self._is_from_start and not is_outdated(names[0], self._time_us, self._keep_us)
        set_checkpoint(self._store, self._keys, self._epoch, made.name, "" if is_from_start else names[0])
        self._is_from_start = is_from_start
        needed = {**self._kept, made.name: made.checkpoint.chunk_names()}
        self._kept = {name: needed[name] for name in names}
        # Chunks of earlier attempts, which no checkpoint has, may be deleted from now on: do not refer to them again.
        self._uploader.known = {chunk.digest: chunk for file in made.checkpoint.files for chunk in file.chunks}
        identities = {path_bytes(file.path): file.identity for file in snapshot.files if not file.is_overwritten}
        self._last = {
            identity: file for file in made.checkpoint.files if (identity := identities.get(file.path)) is not None
        }
        self._verifier.note_stored(made.checkpoint.files, self._last)
        return made

    def make_from(self, disk: ReplicatedDisk, now_us: int, progress: Progress | None = None) -> MadeCheckpoint:
        """Make a checkpoint of a disk as it is now, while it goes on being used; see `make`."""
        tree = disk.freeze()
        try:
            return self.make(tree, now_us, lambda: disk.writer.wait(tree.sequence), progress)
        finally:
            disk.thaw()

    def store_first(self, snapshot: ShardSnapshot[F], now_us: int, progress: Progress) -> MadeCheckpoint:
        """Store the first checkpoint of a shard that has no manifest yet; the caller makes that."""
        return self._store_checkpoint(snapshot, now_us, lambda: None, progress)

    def collect(self, limit: int = 10_000) -> int:
        """Delete what is not kept, at most so many objects; returns how many. Raises Fenced."""
        return perform(self._store, self._collect_steps(limit))

    def _collect_steps(self, limit: int) -> Steps[int]:
        stored = yield from read_manifest_steps(self._keys)
        if stored is None or stored.manifest.epoch != self._epoch:
            raise Fenced(f"the shard is not in epoch {self._epoch} any more", epoch=self._epoch)
        current, oldest = stored.manifest.checkpoint, stored.manifest.oldest
        if current not in self._kept:
            return 0  # one whose attempt failed has become the newest after all: the next one puts that right
        deleted = yield from collect_checkpoints_steps(self._keys, current, self._kept, limit)
        needed = set[str]().union(*self._kept.values(), (chunk.name for chunk in self._uploader.known.values()))
        listed = yield from list_chunks_steps(self._keys)
        self._forget_missing(self._kept[current] - set(listed))
        deleted += yield from collect_chunks_steps(self._keys, self._epoch, listed, needed, limit - deleted)
        position = checkpoint_position(oldest)
        deleted += yield from collect_wal_steps(self._keys, position, self._seals, limit - deleted)
        return deleted

    def _forget_missing(self, missing: set[str]) -> None:
        """Refer no more to chunks that somebody else has deleted: the next checkpoint uploads their content again."""
        self.missing_chunks = len(missing)
        if missing:
            known = self._uploader.known.items()
            self._uploader.known = {digest: chunk for digest, chunk in known if chunk.name not in missing}
            self._last = {
                identity: file
                for identity, file in self._last.items()
                if missing.isdisjoint(chunk.name for chunk in file.chunks)
            }

    def _begin(self) -> None:
        """Learn at the first time which checkpoints there are, and which chunks the one in the manifest has."""
        if self._is_ready:
            return
        stored = read_manifest(self._store, self._keys)
        if stored is None or stored.manifest.epoch != self._epoch:
            raise Fenced(f"the shard is not in epoch {self._epoch} any more", epoch=self._epoch)
        current, oldest = stored.manifest.checkpoint, stored.manifest.oldest
        self._kept, self._is_from_start = {}, not oldest
        if current:
            prefix = self._keys.checkpoint_prefix
            listed = [key.removeprefix(prefix) for key in perform(self._store, list_steps(prefix))]
            chunks = perform(self._store, list_steps(self._keys.chunk_prefix))
            there = {key.removeprefix(self._keys.chunk_prefix) for key in chunks}
            for name in [*(name for name in listed if oldest <= name < current), current]:
                self._take_up(name, there, is_current=name == current)
            self._time_us = parse_checkpoint_name(current).time_us
        self._is_ready = True

    def _take_up(self, name: str, there: set[str], *, is_current: bool) -> None:
        """Keep a checkpoint of an earlier owner, unless it is not whole: that of a fenced owner may not be."""
        checkpoint = load_checkpoint(self._store, self._keys, name)
        missing = {name} if checkpoint is None else checkpoint.chunk_names() - there
        if checkpoint is not None and (is_current or not missing):
            self._kept[name] = checkpoint.chunk_names()
        if is_current and checkpoint is not None:
            refs = [chunk for file in checkpoint.files for chunk in file.chunks if chunk.name in there]
            self._uploader.known = {chunk.digest: chunk for chunk in refs}
            self._verifier.note_stored(checkpoint.files, {})

    def _store_checkpoint(
        self, snapshot: ShardSnapshot[F], now_us: int, wait_committed: Callable[[], None], progress: Progress
    ) -> MadeCheckpoint:
        before, upload = self._uploader.uploaded_bytes, new_nonce()[:16]
        with self._new_pool(_UPLOADS, "headrace-checkpoint") as pool:
            files = self._store_files(pool, snapshot, upload, progress)
        wait_committed()  # a state that is not committed must never be restored
        self._time_us = max(now_us, self._time_us + 1)
        position = snapshot.position
        checkpoint = Checkpoint(
            epoch=position.epoch,
            objects=position.objects,
            time_us=self._time_us,
            directories=tuple(map(path_bytes, snapshot.directories)),
            files=files,
            bindings={file_id: path_bytes(path) for file_id, path in snapshot.bindings.items()},
            seals=tuple(sorted(self._seals.items())),
        )
        stored = self._fitting(checkpoint, upload)
        name = str(CheckpointName(position, self._time_us, upload))
        put_own(self._store, self._keys.checkpoint(name), encode_checkpoint(stored))
        whole = msgspec.structs.replace(stored, files=files)
        return MadeCheckpoint(name, whole, self._uploader.uploaded_bytes - before)

    def _store_files(
        self, pool: Executor, snapshot: ShardSnapshot[F], upload: str, progress: Progress
    ) -> tuple[CheckpointFile, ...]:
        """Upload the chunks of all files, at most twice as many at once as are under way."""
        total, done = sum(file.data_end for file in snapshot.files), 0
        waiting: list[Future[ChunkRef]] = []
        files: list[tuple[F, list[Future[ChunkRef] | ChunkRef]]] = []
        for file in snapshot.files:
            chunks: list[Future[ChunkRef] | ChunkRef] = list(self._unchanged(file))
            done += min(len(chunks) * CHUNK_BYTES, file.data_end)
            trusted = min(len(chunks) * CHUNK_BYTES, file.data_end)
            for begin in range(len(chunks) * CHUNK_BYTES, file.data_end, CHUNK_BYTES):
                data = snapshot.read(file, begin, min(CHUNK_BYTES, file.data_end - begin))
                if len(data) != min(CHUNK_BYTES, file.data_end - begin):
                    snapshot.report_damage(file, begin + len(data), "somebody else has cut it")
                    raise CorruptFile(f"{file.path} is shorter than {file.data_end} bytes", path=file.path)
                trusted = self._verifier.compare(snapshot, file, trusted, begin, data)
                chunks.append(self._uploader.add(pool, data, upload))
                waiting += [each for each in chunks[-1:] if isinstance(each, Future)]
                while len(waiting) > 2 * _UPLOADS:
                    waiting.pop(0).result()
                done += len(data)
                progress(done, total)
            self._verifier.verify(snapshot, file, trusted)
            files.append((file, chunks))
        return tuple(
            CheckpointFile(path_bytes(file.path), file.length, file.data_end, tuple(map(_ready, chunks)))
            for file, chunks in files
        )

    def _unchanged(self, file: SnapshotFile) -> tuple[ChunkRef, ...]:
        """The whole chunks of a file that was only appended to since the last checkpoint: they need not be read."""
        last = None if file.is_overwritten or file.identity is None else self._last.get(file.identity)
        if last is None or last.data_end > file.data_end:
            return ()
        return last.chunks if last.data_end == file.data_end else last.chunks[: last.data_end // CHUNK_BYTES]

    def _fitting(self, checkpoint: Checkpoint, upload: str) -> Checkpoint:
        """The checkpoint as it fits into an object: a long list of files goes into chunks."""
        data = encode_files(checkpoint.files)
        if len(data) <= _FILES_BYTES_MAX:
            return checkpoint
        with self._new_pool(_UPLOADS, "headrace-checkpoint") as pool:
            cut = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
            parts = [self._uploader.add(pool, part, upload) for part in cut]
        return msgspec.structs.replace(checkpoint, files=(), parts=tuple(map(_ready, parts)))


def _ready(chunk: "Future[ChunkRef] | ChunkRef") -> ChunkRef:
    return chunk.result() if isinstance(chunk, Future) else chunk


def _silent(_done: int, _total: int) -> None:
    """Tell nobody."""
