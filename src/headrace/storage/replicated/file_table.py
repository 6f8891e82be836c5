"""The files and directories of a replicated directory, as its owner knows them without looking at the disk."""

from collections.abc import Iterator, Mapping

from headrace.storage.disk import Disk
from headrace.storage.replicated.listing import walk


class FileEntry:
    """A file, whatever its path."""

    __slots__ = (
        "data_end",
        "file_id",
        "found_length",
        "frozen",
        "is_limited",
        "is_overwritten",
        "is_torn",
        "length",
        "path",
    )

    def __init__(self, path: str, length: int = -1, found_length: int | None = None) -> None:
        self.path: str | None = path
        """Relative to the root; None once it was removed or replaced: what is written to it then is in no replica."""
        self.file_id = 0
        """Its id in this epoch's operations; 0 before the first change."""
        self.length = length
        """In bytes; -1 for one that was not opened yet, and so is as the epoch found it."""
        self.found_length = found_length
        """The length with which the epoch found it, if that is known."""
        self.data_end = length
        """The end of what was written: all bytes from here to the length are zeros."""
        self.is_overwritten = False
        """Whether bytes below `data_end` were changed in this epoch."""
        self.is_torn = False
        """Whether a write failed in the middle in this epoch, so that its end may have no checksum."""
        self.is_limited = False
        """Whether writes are refused while too much waits for the store."""
        self.frozen: FrozenFile | None = None
        """Its state in a frozen tree, if a change of its content would change that too."""


class FrozenFile:
    """A file as it was when the tree was frozen."""

    __slots__ = ("_entry", "data_end", "file_id", "is_overwritten", "is_torn", "kept", "length", "path")

    def __init__(self, entry: FileEntry) -> None:
        assert entry.path is not None
        self.path = entry.path
        """Relative to the root, at that moment."""
        self.file_id = entry.file_id
        """Its id in the operations of this epoch; 0 if none has named it yet."""
        self.length = entry.length
        self.data_end = entry.data_end
        """Bytes from here to the length are zeros, and are not to be read."""
        self.is_overwritten = entry.is_overwritten
        self.is_torn = entry.is_torn
        self.kept: str | None = None
        """Where its content was preserved; None while the file still has it."""
        self._entry = entry

    @property
    def identity(self) -> object:
        """The same for the same file in every frozen tree of an epoch, whatever its path."""
        return self._entry

    @property
    def current_path(self) -> str | None:
        """The path of the file now, relative to the root."""
        return self._entry.path

    def release(self) -> None:
        """Need not be preserved any more."""
        if self._entry.frozen is self:
            self._entry.frozen = None


class FileTable:
    """All files and directories below a root, by their paths relative to it."""

    def __init__(self, disk: Disk, root: str, lengths: Mapping[str, int] | None = None) -> None:
        """Look through the directory once; a file is measured when it is first opened for writing.

        `lengths` has all files that belong there, also those that are missing from the disk.
        """
        self.files: dict[str, FileEntry] = {}
        self.directories: set[str] = set()
        for path, is_directory in walk(disk, root):
            if is_directory:
                self.directories.add(path)
            else:
                self.files[path] = FileEntry(path)
        for path, length in (lengths or {}).items():
            self.files[path] = FileEntry(path, found_length=length)

    def lengths(self) -> dict[str, int]:
        """The lengths of all files, of those that are known."""
        known = ((path, entry.found_length if entry.length < 0 else entry.length) for path, entry in self.files.items())
        return {path: length for path, length in known if length is not None}

    def add(self, path: str, length: int) -> FileEntry:
        """Add a file."""
        entry = self.files[path] = FileEntry(path, length)
        return entry

    def remove(self, path: str) -> None:
        """Forget a file."""
        entry = self.files.pop(path, None)
        if entry is not None:
            entry.path = None

    def remove_directory(self, path: str) -> None:
        """Forget an empty directory."""
        self.directories.discard(path)

    def rename(self, source: str, target: str) -> Iterator[FileEntry]:
        """Follow a file or directory to its new path, where it replaces a file; returns the files that moved."""
        self.remove(target)
        if source not in self.directories:
            yield self._move(source, target)
            return
        for path in self._below(source, self.directories):
            self.directories.remove(path)
            self.directories.add(target + path.removeprefix(source))
        self.directories.remove(source)
        self.directories.add(target)
        for path in self._below(source, self.files):
            yield self._move(path, target + path.removeprefix(source))

    def _move(self, source: str, target: str) -> FileEntry:
        entry = self.files.pop(source, None) or FileEntry(source)
        entry.path = target
        self.files[target] = entry
        return entry

    @staticmethod
    def _below(directory: str, paths: "set[str] | dict[str, FileEntry]") -> list[str]:
        return [path for path in paths if path.startswith(f"{directory}/")]
