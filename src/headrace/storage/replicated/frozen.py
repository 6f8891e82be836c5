"""A frozen tree: the files of a shard as they were at one position of its log, readable while the broker goes on."""

import logging
import threading
from collections.abc import Callable

from headrace.model.errors import DiskFailed, HeadraceError, LogNotFound
from headrace.storage.disk import Disk, OpenFile
from headrace.storage.replicated.file_table import FileEntry, FileTable, FrozenFile
from headrace.storage.replicated.keys import Position

logger = logging.getLogger("headrace.storage")

_CHUNK_BYTES = 1 << 20


class FrozenTree:
    """What a checkpoint holds: all directories and files, exactly as after the operations before `position`.

    How the author of a checkpoint uses it:

        tree = disk.freeze()
        try:
            for file in tree.files:
                ... tree.read(file, at, 8 << 20) for at in range(0, file.data_end, 8 << 20) ...
            disk.writer.wait(tree.sequence)    # the checkpoint counts only when all objects before it are committed
        finally:
            disk.thaw()

    - `position` is exact: objects before it have all operations that made this tree, those from it on have none.
    - `files` has, for each file, its path, its length, its `data_end` (all bytes behind it are zeros) and its
      `file_id`, which later operations of the epoch use: a checkpoint keeps the ids for `Applier(bindings=...)`.
    - `read` gives the bytes of that moment. Files that only grow are read as they are. Before a file is overwritten or
      cut below its `data_end`, it is copied to the trash directory; one that is removed or replaced is moved there.
    - If that is not possible (the disk is full), the change happens nevertheless, and `read` raises: begin again later.
    """

    def __init__(
        self,
        disk: Disk,
        lock: threading.Lock,
        root: str,
        trash: str,
        table: FileTable,
        position: Position,
        sequence: int,
    ) -> None:
        """Take the state of all files; the caller, the ReplicatedDisk, holds the lock."""
        self.position = position
        """Where the replay of WAL objects begins that leads on from here."""
        self.sequence = sequence
        """Of the last operation before the position: the writer's `wait` takes it."""
        self.directories = sorted(table.directories)
        self.files: list[FrozenFile] = []
        """All files, in no order."""
        for entry in table.files.values():
            entry.frozen = frozen = FrozenFile(entry)
            self.files.append(frozen)
        self.report: Callable[[str, int, str], None] = lambda _path, _position, _reason: None
        """Takes the path, a position and the reason where a file turns out to be damaged; raises to end the reading."""
        self._disk = disk
        self._lock = lock
        self._root = root
        self._trash = trash
        self._kept = 0
        self._failure: HeadraceError | None = None
        self._is_closed = False
        self._open: tuple[FrozenFile, str, OpenFile] | None = None

    @property
    def bindings(self) -> dict[int, str]:
        """The path of each id, for an Applier that begins at `position`."""
        return {file.file_id: file.path for file in self.files if file.file_id}

    def report_damage(self, file: FrozenFile, position: int, reason: str) -> None:
        """Tell the disk that a file is damaged; raises NotServing unless the store has the same bytes."""
        self.report(file.path, position, reason)

    def read(self, file: FrozenFile, position: int, length: int) -> bytes:
        """Bytes of a file, as they were; fewer at its `data_end`. One thread at a time reads a tree.

        Raises if the tree is not frozen any more, or could not be preserved.
        """
        length = min(length, file.data_end - position)
        while length > 0:
            try:
                with self._lock:
                    kept, opened = file.kept, self._source(file)
            except LogNotFound:
                self.report_damage(file, 0, "somebody else has removed it")
                raise
            found = self._disk.read(opened, position, length)
            with self._lock:
                if self._path(file) and file.kept == kept:
                    return found
            # It was preserved meanwhile, and perhaps overwritten before it was read.
        return b""

    def _source(self, file: FrozenFile) -> OpenFile:
        path = self._path(file)
        if self._open is None or self._open[:2] != (file, path):
            self._open = file, path, self._disk.open(path)
        return self._open[2]

    def _path(self, file: FrozenFile) -> str:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise DiskFailed("the tree is not frozen any more")
        return file.kept or f"{self._root}/{file.current_path}"

    # Called by the disk, which holds the lock, before it changes a file.

    def preserve_copy(self, entry: FileEntry) -> None:
        """Copy a file that is about to be overwritten or cut; it may have been moved away, and be open still."""
        frozen, entry.frozen = entry.frozen, None
        if frozen is None or self._failure is not None or not frozen.data_end:
            return
        try:
            source = self._disk.open(self._path(frozen))
            target = self._next_path()
            copy = self._disk.open(target, create=True)
            for at in range(0, frozen.data_end, _CHUNK_BYTES):
                self._disk.write(copy, at, self._disk.read(source, at, min(_CHUNK_BYTES, frozen.data_end - at)))
        except (HeadraceError, OSError) as error:
            self._give_up(frozen, error)
        else:
            frozen.kept = target

    def preserve_away(self, entry: FileEntry, path: str) -> None:
        """Move a file away that is about to be removed or replaced."""
        frozen = entry.frozen
        if frozen is None or self._failure is not None or not frozen.data_end:
            return
        try:
            target = self._next_path()
            self._disk.rename(path, target, sync=False)
        except (HeadraceError, OSError) as error:
            self._give_up(frozen, error)
        else:
            frozen.kept = target

    def bring_back(self, entry: FileEntry, path: str) -> None:
        """Undo `preserve_away`, as the file was not replaced after all."""
        if entry.frozen is not None and entry.frozen.kept is not None:
            self._disk.rename(entry.frozen.kept, path, sync=False)
            entry.frozen.kept = None

    def _next_path(self) -> str:
        if not self._kept:
            self._disk.make_directory(self._trash, sync=False, private=True)
            self._empty_trash()  # of a checkpoint that was interrupted
        self._kept += 1
        return f"{self._trash}/{self._kept}"

    def _give_up(self, frozen: FrozenFile, error: Exception) -> None:
        logger.warning("checkpoint given up: a file was not preserved  path=%s reason=%s", frozen.path, error)
        self._failure = DiskFailed(f"{frozen.path} could not be preserved for the checkpoint: {error}")

    def close(self) -> None:
        """Remove what was preserved; called by `thaw`."""
        with self._lock:
            self._is_closed = True
            self._open = None
            for file in self.files:
                file.release()
            if self._kept:
                self._empty_trash()

    def _empty_trash(self) -> None:
        for name in self._disk.names(self._trash):
            self._disk.remove(f"{self._trash}/{name}", sync=False)
