"""Applies the operations of WAL objects to a directory: what a follower does all the time, and a restore at its end."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from headrace.model.errors import LogNotFound
from headrace.storage.disk import Disk, OpenFile
from headrace.storage.replicated.listing import CopyListing, found_lengths
from headrace.storage.replicated.operations import (
    CreateFile,
    MakeDirectory,
    OpenExisting,
    Operation,
    Remove,
    RemoveDirectory,
    Rename,
    Truncate,
    Write,
    Zero,
)

_FILES_MAX = 64


class OperationMismatch(Exception):
    """An operation does not fit the directory: it has not the state that the operations before it left."""


class FileBindings:
    """Which file each id names: ids stay with their files through renames, and end with them."""

    def __init__(self, paths: Mapping[int, str] | None = None) -> None:
        self.paths = dict(paths or {})
        """The path of each id, relative to the root."""
        self._ids = {path: file_id for file_id, path in self.paths.items()}

    def bind(self, file_id: int, path: str) -> None:
        """Give a file an id."""
        self.remove(path)
        self.paths[file_id] = path
        self._ids[path] = file_id

    def rename(self, source: str, target: str) -> None:
        """Follow a file to its new path, or all files of a directory."""
        self.remove(target)
        file_id = self._ids.pop(source, None)
        if file_id is not None:
            self.paths[file_id] = target
            self._ids[target] = file_id
            return
        for path in self._below(source):
            self.rename(path, target + path.removeprefix(source))

    def remove(self, path: str) -> int | None:
        """End the id of a file; returns it, or None if it had none."""
        file_id = self._ids.pop(path, None)
        if file_id is not None:
            del self.paths[file_id]
        return file_id

    def remove_below(self, directory: str) -> list[int]:
        """End the ids of all files in a directory; returns them."""
        return [file_id for path in self._below(directory) if (file_id := self.remove(path)) is not None]

    def _below(self, directory: str) -> list[str]:
        return [path for path in self._ids if path.startswith(f"{directory}/")]


class Applier:
    """Applies operations below a root directory of a disk, in their order, and syncs nothing: the copy is a cache.

    The directory must have exactly the state before the first operation, and `bindings` the ids of that moment: those
    of the checkpoint, or none at the beginning of an epoch. An operation that does not fit raises OperationMismatch;
    the directory is to be compared with the checkpoint then, as it is after a crash in the middle of an object. To make
    a directory that exists, and to remove a file that does not, is no mismatch. One thread at a time.
    """

    def __init__(
        self,
        disk: Disk,
        root: str,
        bindings: Mapping[int, str] | None = None,
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        """`lengths` are those that the files must have; without them, they are right as they are."""
        self._disk = disk
        self._root = root
        self._bindings = FileBindings(bindings)
        self._files: OrderedDict[int, OpenFile] = OrderedDict()
        disk.make_directory(root, sync=False, private=True)
        self.listing = CopyListing(found_lengths(disk, root) if lengths is None else lengths)
        """The files that the directory must have."""

    def check(self) -> None:
        """Raise OperationMismatch if files are missing, too many or of other lengths: somebody else was there."""
        found = self.listing.difference(self._disk, self._root)
        if found:
            raise OperationMismatch(found)

    @property
    def bindings(self) -> dict[int, str]:
        """The ids of this epoch with their paths: for another Applier that continues where this one stops."""
        return dict(self._bindings.paths)

    def begin_epoch(self) -> None:
        """Forget all ids: call this before the first operation of another epoch."""
        self._bindings = FileBindings()
        self._files.clear()

    def close(self) -> None:
        """Close all files."""
        self._files.clear()

    def apply(self, operations: Iterable[Operation]) -> None:
        """Apply operations."""
        for operation in operations:
            try:
                self._apply(operation)
            except (FileExistsError, LogNotFound, KeyError) as error:
                text = f"{type(operation).__name__} {operation[:2]} below {self._root}: {error!r}"
                raise OperationMismatch(text) from error

    def _apply(self, operation: Operation) -> None:
        match operation:
            case Write(file_id, position, data):
                self._disk.write(self._file(file_id), position, data)
                self.listing.wrote(self._bindings.paths[file_id], position + len(data))
            case Zero(file_id, position, length):
                self._disk.zero(self._file(file_id), position, length)
                self.listing.wrote(self._bindings.paths[file_id], position + length)
            case Truncate(file_id, length):
                self._disk.truncate(self._file(file_id), length)
                self.listing.lengths[self._bindings.paths[file_id]] = length
            case CreateFile(file_id, path):
                self._keep(file_id, self._disk.open(self._at(path), create=True))
                self._bindings.bind(file_id, path)
                self.listing.lengths[path] = 0
            case OpenExisting(file_id, path):
                self._keep(file_id, self._disk.open(self._at(path), write=True))
                self._bindings.bind(file_id, path)
            case _:
                self._apply_to_names(operation)

    def _apply_to_names(self, operation: Operation) -> None:
        match operation:
            case Rename(source, target):
                self._disk.rename(self._at(source), self._at(target), sync=False)
                self._files.clear()  # an open file knows its path, and the one replaced may be open
                self._bindings.rename(source, target)
                self.listing.renamed(source, target)
            case Remove(path):
                self._disk.remove(self._at(path), sync=False)
                self.listing.lengths.pop(path, None)
                self._files.pop(self._bindings.remove(path) or 0, None)
            case MakeDirectory(path):
                self._disk.make_directory(self._at(path), sync=False, private=True)
            case RemoveDirectory(path):
                for file_id in self._bindings.remove_below(path):
                    self._files.pop(file_id, None)
                self._disk.remove_directory(self._at(path))
                self.listing.removed_below(path)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _file(self, file_id: int) -> OpenFile:
        file = self._files.get(file_id)
        if file is None:
            return self._keep(file_id, self._disk.open(self._at(self._bindings.paths[file_id]), write=True))
        self._files.move_to_end(file_id)
        return file

    def _keep(self, file_id: int, file: OpenFile) -> OpenFile:
        self._files[file_id] = file
        if len(self._files) > _FILES_MAX:
            self._files.popitem(last=False)
        return file
