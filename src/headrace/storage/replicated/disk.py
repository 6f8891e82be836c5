"""The disk of a shard's owner: changes the local files, and records each change for the shared store.

The local files are a cache: they are never synced. `sync` returns when the store has every change made so far, of all
files, so whoever applies the WAL objects has at least that; what they have is always what the files had after some
change, in the order of the changes, which is more than a crash of a local disk leaves.
"""

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import NoReturn

from headrace.model.errors import (
    Busy,
    DiskFailed,
    DiskFull,
    HeadraceError,
    InvalidArgument,
    LogNotFound,
    NotServing,
    UnsupportedOperation,
)
from headrace.storage.disk import Disk, OpenFile, SyncCallback, after_fork
from headrace.storage.replicated.file_table import FileEntry, FileTable
from headrace.storage.replicated.frozen import FrozenTree
from headrace.storage.replicated.operations import (
    CreateFile,
    MakeDirectory,
    OpenExisting,
    Operation,
    Remove,
    RemoveDirectory,
    Rename,
    Truncate,
    Zero,
    encode_operation,
)
from headrace.storage.replicated.writer import WalWriter

logger = logging.getLogger("headrace.storage")

BACKLOG_BYTES_MAX = 256 << 20
"""While more is recorded and not committed, writes to topics are refused with Busy."""
LIMITED_FOLDER = "topics/"
"""The files whose writes may be refused: those of messages. What the broker must record, it may always record."""
_CHUNK_BYTES = 1 << 20
_TAIL_BYTES = 4 << 10
_SHARD_BYTES = 8
"""The part of a boot id that is the same in all epochs of a shard."""


class ReplicatedFile(OpenFile):
    """An open file below the root of a ReplicatedDisk; its inner file closes when this goes."""

    __slots__ = ("_opened", "entry")

    def __init__(self, disk: Disk, opened: OpenFile, entry: FileEntry | None) -> None:
        super().__init__(disk, opened.fd, opened.path)
        self._opened = opened
        self.entry = entry
        """None if it was opened for reading only."""

    def __del__(self) -> None:
        """Leave the closing to the inner file."""


class ReplicatedDisk(Disk):
    """A disk that replicates one directory of another disk, the root; all other paths are passed on to that disk.

    One lock is held around each change and its record, so that the recorded order is the order of the changes. If a
    local change fails in the middle, what is there then is recorded. Once the writer is fenced or abandoned, every
    change and every sync raises its error; reading goes on.

    `freeze` is the seam for checkpoints.
    """

    is_replicated = True

    def __init__(
        self,
        inner: Disk,
        root: str,
        writer: WalWriter,
        *,
        trash: str,
        lengths: Mapping[str, int] | None = None,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
    ) -> None:
        """Replicate a directory, which has the state that all earlier operations of the shard have left.

        :param trash: a directory of the inner disk, outside the root, for files that a checkpoint still reads.
        :param lengths: of all files in that state; without them, the directory has it as it is.
        """
        self._inner = inner
        self._root = root.rstrip("/")
        self._below = f"{self._root}/"
        self._writer = writer
        self._trash = trash
        self._backlog_bytes_max = backlog_bytes_max
        of_shard, of_epoch = (sha256(f"{writer.keys.root}{more}".encode()) for more in ("", f" epoch {writer.epoch}"))
        self._boot_id = of_shard.digest()[:_SHARD_BYTES] + of_epoch.digest()[: 16 - _SHARD_BYTES]
        self._lock = threading.Lock()
        self._table = FileTable(inner, self._root, lengths)
        self._ids = 0
        self._frozen: FrozenTree | None = None
        self.damaged: dict[str, str] = {}
        """The files of the local copy that were found damaged, with the reason; nothing changes any more then."""
        self.on_damage: Callable[[], None] = lambda: None
        """Called, on any thread, when the local copy was found damaged."""
        self.known_damage: dict[str, list[range]] = {}
        """The damaged bytes of files that are the same in the store: what is made of them is no business of a copy."""
        self._defers_syncs = False
        me = weakref.ref(self)  # weakly: the inner disk may outlive this one
        inner.close_some = lambda: (disk := me()) is not None and disk.close_some()
        _disks.add(self)

    @property
    def writer(self) -> WalWriter:
        """The writer of this epoch."""
        return self._writer

    # Files.

    def open(self, path: str, *, write: bool = False, create: bool = False) -> OpenFile:
        """Open a file; with `create` it must not exist yet."""
        relative = self._relative(path)
        if relative is None:
            return self._inner.open(path, write=write, create=create)
        if not write and not create:
            return ReplicatedFile(self, self._open_to_read(path), None)
        with self._lock:
            if create:
                self._writer.check()
            try:
                opened = self._inner.open(path, write=write, create=create)
            except DiskFull as error:
                self._tell_failed(error)
                raise
            is_missing = create and relative in self._table.files
            if is_missing:
                entry = self._table.files[relative]
            elif create:
                entry = self._table.add(relative, 0)
                self._bind(entry, CreateFile)
            else:
                entry = self._table.files.get(relative) or self._table.add(relative, -1)
                self._measure(entry, opened)
            entry.is_limited = relative.startswith(LIMITED_FOLDER)
        if is_missing:  # a log that is begun anew would be recorded, and become that of the shard
            self._stop_damaged(relative, "is missing", "somebody else has removed it")
        return ReplicatedFile(self, opened, entry)

    def close(self, fd: int) -> None:
        """Close a file of the inner disk by its number."""
        self._inner.close(fd)

    def write(self, file: OpenFile, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of the data at a position, or raise; Busy if the store is too far behind.

        The caller may change the data when this returns.
        """
        entry = self._entry(file)
        if entry is None:
            self._inner.write(file, position, data)
            return
        with self._lock:
            self._check_writable(entry)
            if position < entry.data_end:
                self._before_overwriting(entry)
            if self.known_damage:
                self._forget_damage(entry, position, position + len(data))
            try:
                self._inner.write(file, position, data)
            except BaseException as error:
                if not self._undo(file, entry, position):
                    self._record_found(file, entry, position, len(data))
                self._tell_failed(error)
                raise
            self._record_write(entry, position, bytes(data))

    def zero(self, file: OpenFile, position: int, length: int) -> None:
        """Write zeros."""
        entry = self._entry(file)
        if entry is None:
            self._inner.zero(file, position, length)
            return
        with self._lock:
            self._check_writable(entry)
            if position < entry.data_end:
                self._before_overwriting(entry)
            try:
                self._inner.zero(file, position, length)
            except BaseException:
                if not self._undo(file, entry, position):
                    self._record_found(file, entry, position, length)
                raise
            if entry.path is not None and length:
                self._bind(entry)
                self._record(Zero(entry.file_id, position, length))
                entry.length = max(entry.length, position + length)

    def truncate(self, file: OpenFile, length: int) -> None:
        """Set a file's length."""
        entry = self._entry(file)
        if entry is None:
            self._inner.truncate(file, length)
            return
        with self._lock:
            self._writer.check()
            if length < entry.data_end:
                self._before_overwriting(entry)
            if self.known_damage:
                self._forget_damage(entry, length)
            self._inner.truncate(file, length)
            if entry.path is not None:
                self._bind(entry)
                self._record(Truncate(entry.file_id, length))
                entry.length, entry.data_end = length, min(entry.data_end, length)

    def sync(self, file: OpenFile) -> None:
        """Return when the store has everything that was recorded so far, of all files."""
        if isinstance(file, ReplicatedFile):
            if self._defers_syncs:
                self._writer.check()
            else:
                self._writer.wait()
        else:
            self._inner.sync(file)

    def begin_sync(self, file: OpenFile, done: SyncCallback) -> bool:
        """Have everything put that was recorded so far, and call back; False while the store is quick."""
        if not isinstance(file, ReplicatedFile) or self._defers_syncs or not self._writer.overlaps:
            return False
        self._writer.when_committed(done)
        return True

    @property
    def overlaps_syncs(self) -> bool:
        """Whether the store is slow: several objects are on their way to it then."""
        return self._writer.overlaps

    def defer_syncs(self) -> None:
        """Let syncs return at once from now on: before a hand-over, when nobody is told anything more.

        The broker closes many logs then, each with syncs of its own. Who hands over flushes the writer once in the end;
        the store gets everything in the order in which it was recorded.
        """
        self._defers_syncs = True

    def read(self, file: OpenFile, position: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the file."""
        try:
            return self._inner.read(file, position, length)
        except DiskFailed as error:
            self._tell_failed(error)
            raise

    def size(self, file: OpenFile) -> int:
        """The length of an open file in bytes."""
        return self._inner.size(file)

    def map(self, file: OpenFile, length: int, *, write: bool = False) -> memoryview:
        """Map the first `length` bytes for reading; changes through a mapping could not be recorded."""
        if write and isinstance(file, ReplicatedFile):
            raise UnsupportedOperation(
                f"{file.path} is on a replicated disk, where no file can be changed through memory: an embedded log "
                "needs a directory of its own on a local disk; in a cluster, publish to a topic instead"
            )
        return self._inner.map(file, length, write=write)

    def lock(self, file: OpenFile, *, wait: bool = False, shared: bool = False) -> bool:
        """Take the file's lock on this machine; locks are not replicated."""
        return self._inner.lock(file, wait=wait, shared=shared)

    def unlock(self, file: OpenFile) -> None:
        """Release the file's lock."""
        self._inner.unlock(file)

    # Names.

    def exists(self, path: str) -> bool:
        """Whether there is a file or directory at the path."""
        if self._inner.exists(path):
            return True
        with self._lock:  # a file that is being replaced is away for a moment while the tree is frozen
            return self._inner.exists(path)

    def is_directory(self, path: str) -> bool:
        """Whether there is a directory at the path."""
        return self._inner.is_directory(path)

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; none when there is no such directory."""
        with self._lock:
            return self._inner.names(path)

    def make_directory(self, path: str, *, sync: bool = True, private: bool = False) -> None:
        """Make a directory and the ones above it; it may exist."""
        relative = self._relative(path)
        if relative is None:
            self._inner.make_directory(path, sync=sync, private=private)
            return
        if self._inner.is_directory(path):
            return
        self.make_directory(path.rpartition("/")[0], sync=False, private=private)
        with self._lock:
            self._writer.check()
            self._inner.make_directory(path, sync=False, private=private)
            if relative not in self._table.directories:
                self._table.directories.add(relative)
                self._record(MakeDirectory(relative))

    def sync_directory(self, path: str) -> None:
        """Return at once if there is such a directory: what it holds is recorded before what follows."""
        if self._relative(path) is None and path.rstrip("/") != self._root:
            self._inner.sync_directory(path)
        elif not self._inner.is_directory(path):
            raise LogNotFound(f"there is no {path}")

    def rename(self, source: str, target: str, *, sync: bool = True) -> None:
        """Rename a file or directory, replacing a file of the new name atomically."""
        old, new = self._relative(source), self._relative(target)
        if old is None and new is None:
            self._check_not_above(source, target)
            self._inner.rename(source, target, sync=sync)
            return
        if old is None or new is None:
            raise InvalidArgument(f"{source} cannot become {target}: only one of them is below {self._root}")
        with self._lock:
            self._writer.check()
            # Only a file replaces a file: moved away, it would let a directory take its place.
            self._replace(source, target, self._table.files.get(new) if old in self._table.files else None)
            if old != new:
                self._record(Rename(old, new))
                for entry in self._table.rename(old, new):
                    entry.is_limited = (entry.path or "").startswith(LIMITED_FOLDER)

    def _replace(self, source: str, target: str, replaced: FileEntry | None) -> None:
        """Rename on the inner disk; a file that a frozen tree needs is moved away before, or back if this fails."""
        if replaced is None or replaced.frozen is None or self._frozen is None or source == target:
            self._inner.rename(source, target, sync=False)
            return
        self._frozen.preserve_away(replaced, target)
        try:
            self._inner.rename(source, target, sync=False)
        except BaseException:
            self._frozen.bring_back(replaced, target)
            raise

    def remove(self, path: str, *, sync: bool = True) -> None:
        """Remove a file, if it is there."""
        relative = self._relative(path)
        if relative is None:
            self._inner.remove(path, sync=sync)
            return
        with self._lock:
            self._writer.check()
            entry = self._table.files.get(relative)
            if entry is not None:
                self._preserve_away(entry, path)
            self._inner.remove(path, sync=False)
            if entry is not None:
                self._table.remove(relative)
                self._record(Remove(relative))

    def remove_directory(self, path: str) -> None:
        """Remove a directory and all that is in it."""
        relative = self._relative(path)
        if relative is None:
            self._check_not_above(path)
            self._inner.remove_directory(path)
            return
        for name in self.names(path):
            below = f"{path}/{name}"
            if self._inner.is_directory(below):
                self.remove_directory(below)
            else:
                self.remove(below)
        with self._lock:
            self._writer.check()
            self._inner.remove_directory(path)
            self._table.remove_directory(relative)
            self._record(RemoveDirectory(relative))

    def boot_id(self) -> bytes:
        """Differs with each epoch, in which changes that were not committed are lost; its beginning does not."""
        return self._boot_id

    def kept_order_since(self, boot_id: bytes) -> bool:
        """Whether the boot was an epoch of this shard: what is there is what the files had after some change."""
        return boot_id[:_SHARD_BYTES] == self._boot_id[:_SHARD_BYTES]

    def descriptors_max(self) -> int:
        """How many files and mappings the process may have open."""
        return self._inner.descriptors_max()

    # Damage.

    def report_damage(self, path: str, position: int, reason: str) -> None:
        """Stop all changes, and have the local copy restored: raises NotServing, unless the store has the same bytes.

        Nothing is made of the damage meanwhile: what follows from it, such as a log that is cut or a message that is
        rejected, would be recorded.
        """
        relative = self._relative(path)
        if relative is None or any(position in known for known in self.known_damage.get(relative, ())):
            return
        self._stop_damaged(relative, f"is damaged at byte {position}", reason)

    def _stop_damaged(self, relative: str, what: str, reason: str) -> NoReturn:
        error = NotServing(f"the local copy of {relative} {what}: it is restored from the store")
        if not self.damaged:
            path = self._below + relative
            logger.error("local copy damaged; restoring it from the store  path=%s reason=%s", path, reason)
        self.damaged[relative] = reason
        self._writer.abandon(error)
        self.on_damage()
        raise error

    def _forget_damage(self, entry: FileEntry, begin: int, end: int = sys.maxsize) -> None:
        """Bytes that were written are good."""
        known = self.known_damage.get(entry.path or "")
        if known:
            known[:] = [one for one in known if one.stop <= begin or one.start >= end]

    # Checkpoints, and the next epoch.

    def lengths(self) -> dict[str, int]:
        """The lengths of all files, with all that was recorded."""
        with self._lock:
            return self._table.lengths()

    def freeze(self) -> FrozenTree:
        """Freeze the tree for a checkpoint; FrozenTree says what that means. Only one at a time.

        Publishing goes on: the lock is held for about a microsecond for each file, and not while files are read.
        """
        for entry in list(self._table.files.values()):
            if entry.length < 0:
                with self._lock:
                    if entry.path is not None and entry.length < 0:
                        self._measure(entry, self._inner.open(self._below + entry.path))
        with self._lock:
            assert self._frozen is None, "the tree is frozen already"
            self._writer.check()
            position, sequence = self._writer.cut()
            self._frozen = FrozenTree(self._inner, self._lock, self._root, self._trash, self._table, position, sequence)
            self._frozen.report = lambda path, at, reason: self.report_damage(self._below + path, at, reason)
            return self._frozen

    def thaw(self) -> None:
        """End the freeze, and remove what was preserved for it; may be called again."""
        with self._lock:
            frozen, self._frozen = self._frozen, None
        if frozen is not None:
            frozen.close()

    # Recording; the lock is held.

    def _record(self, operation: Operation) -> None:
        self._writer.record(encode_operation(operation))

    def _record_write(self, entry: FileEntry, position: int, data: bytes) -> None:
        if entry.path is None or not data:
            return
        if not entry.file_id:
            self._bind(entry)
        self._writer.record_write(entry.file_id, position, data)
        end = position + len(data)
        if end > entry.data_end:
            entry.data_end = end
            if end > entry.length:
                entry.length = end

    def _undo(self, file: OpenFile, entry: FileEntry, position: int) -> bool:
        """Take back what a write behind the data of a file, such as an append, has left; returns whether that worked.

        The store then gets no part of a batch, which the next owner could not tell from damage.
        """
        if entry.path is None or position < entry.data_end:
            return False
        try:
            self._inner.truncate(file, min(position, entry.length))
            self._inner.truncate(file, entry.length)
        except Exception as error:  # noqa: BLE001 whatever it was, what is there is recorded instead
            logger.debug("failed write not undone  path=%s reason=%s", file.path, error)
            return False
        return True

    def _record_found(self, file: OpenFile, entry: FileEntry, position: int, length: int) -> None:
        """Record what a write that failed has left, so that the replica is still the same."""
        entry.is_torn = True
        try:
            for at in range(position, position + length, _CHUNK_BYTES):
                self._record_write(entry, at, self._inner.read(file, at, min(_CHUNK_BYTES, position + length - at)))
        except Exception as error:  # noqa: BLE001 whatever it was, the record does not match the file any more
            lost = _lost_track(file.path, error)
            self._writer.abandon(lost)
            self.on_failure(lost)

    def _tell_failed(self, error: BaseException) -> None:
        """Tell the node that the local disk is full or broken; logs tell it of other changes that failed."""
        if isinstance(error, DiskFull | DiskFailed):
            self.on_failure(error)

    def _bind(self, entry: FileEntry, kind: type[CreateFile] | type[OpenExisting] = OpenExisting) -> None:
        if not entry.file_id and entry.path is not None:
            self._ids += 1
            entry.file_id = self._ids
            self._record(kind(entry.file_id, entry.path))

    def _check_writable(self, entry: FileEntry) -> None:
        writer = self._writer
        if writer.failure is not None:
            writer.check()
        if entry.is_limited and writer.backlog_bytes > self._backlog_bytes_max:
            raise Busy(
                f"{writer.backlog_bytes} bytes wait for the shared store, which does not keep up; try again in a moment"
            )

    def _before_overwriting(self, entry: FileEntry) -> None:
        entry.is_overwritten = True
        if entry.frozen is not None and self._frozen is not None:
            self._frozen.preserve_copy(entry)

    def _preserve_away(self, entry: FileEntry, path: str) -> None:
        if entry.frozen is not None and self._frozen is not None:
            self._frozen.preserve_away(entry, path)

    def _measure(self, entry: FileEntry, opened: OpenFile) -> None:
        """Find the length of a file that an earlier epoch left, and the zeros at its end, which appends overwrite."""
        if entry.length >= 0:
            return
        end = length = self._inner.size(opened)
        step = _TAIL_BYTES
        while end:
            begin = max(end - step, 0)
            data = self._inner.read(opened, begin, end - begin).rstrip(b"\0")
            end = begin + len(data)
            if data:
                break
            step = _CHUNK_BYTES
        entry.length, entry.data_end = length, end

    # Paths.

    def _relative(self, path: str) -> str | None:
        """The path from the root on; None if it is not below it."""
        if not path.startswith(self._below):
            return None
        relative = path[len(self._below) :].rstrip("/")
        if ("//" in relative or "/." in relative or relative.startswith(".")) and not {"", ".", ".."}.isdisjoint(
            relative.split("/")
        ):
            raise InvalidArgument(f"{path} must be written without empty parts, `.` and `..`")
        return relative or None

    def _check_not_above(self, *paths: str) -> None:
        for path in paths:
            if self._below.startswith(f"{path.rstrip('/')}/"):
                raise InvalidArgument(f"{path} holds the replicated directory {self._root}, and must stay where it is")

    def _entry(self, file: OpenFile) -> FileEntry | None:
        return file.entry if isinstance(file, ReplicatedFile) else None

    def _open_to_read(self, path: str) -> OpenFile:
        try:
            return self._inner.open(path)
        except LogNotFound:
            with self._lock:  # as in `exists`
                return self._inner.open(path)

    def abandon_in_child(self) -> None:
        """In a forked child: the lock may be held by a thread of the parent."""
        self._lock = threading.Lock()


def _lost_track(path: str, error: BaseException) -> HeadraceError:
    return DiskFailed(f"{path} could not be written, nor read afterwards ({error!r}); the local copy cannot be trusted")


_disks: weakref.WeakSet[ReplicatedDisk] = weakref.WeakSet()


def _abandon_all() -> None:
    for disk in list(_disks):
        disk.abandon_in_child()


after_fork(_abandon_all)
