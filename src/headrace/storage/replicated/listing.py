"""Which files a copy of a shard has and how long they are, so that nobody builds on one that somebody has changed."""

from collections.abc import Iterator, Mapping
from hashlib import sha256

from headrace.storage.disk import Disk

_NAMED_MAX = 3


def walk(disk: Disk, root: str, below: str = "") -> Iterator[tuple[str, bool]]:
    """All paths below a directory with whether they are directories, each after the one that holds it."""
    for name in disk.names(f"{root}/{below}" if below else root):
        path = f"{below}/{name}" if below else name
        is_directory = disk.is_directory(f"{root}/{path}")
        yield path, is_directory
        if is_directory:
            yield from walk(disk, root, path)


def found_lengths(disk: Disk, root: str) -> dict[str, int]:
    """The lengths of the files that are below a directory, by their paths relative to it."""
    lengths = ((path, disk.length(f"{root}/{path}")) for path, is_directory in walk(disk, root) if not is_directory)
    return {path: length for path, length in lengths if length is not None}


class CopyListing:
    """The lengths that the files of a copy have after the operations so far."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        self.lengths = dict(lengths)
        """By the paths of the files, relative to the root."""

    def digest(self) -> str:
        """The same for the same listing."""
        lines = (f"{path}\0{length}\n" for path, length in sorted(self.lengths.items()))
        return sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()

    def difference(self, disk: Disk, root: str) -> str:
        """What differs below a root from the listing, for people; empty if nothing does."""
        found = found_lengths(disk, root)
        if found == self.lengths:
            return ""
        paths = sorted(path for path in {*found, *self.lengths} if found.get(path) != self.lengths.get(path))
        named = ", ".join(f"{path} ({_shown(found.get(path), self.lengths.get(path))})" for path in paths[:_NAMED_MAX])
        more = f", and {len(paths) - _NAMED_MAX} more" if len(paths) > _NAMED_MAX else ""
        return f"somebody else has changed files below {root}: {named}{more}"

    def wrote(self, path: str, end: int) -> None:
        """Bytes were written up to a position."""
        if self.lengths.get(path, 0) < end:
            self.lengths[path] = end

    def renamed(self, source: str, target: str) -> None:
        """A file, or a directory, has another path; a file that had it is gone."""
        length = self.lengths.pop(source, None)
        if length is not None:
            self.lengths[target] = length
            return
        for path in self._below(source):
            self.lengths[target + path.removeprefix(source)] = self.lengths.pop(path)

    def removed_below(self, directory: str) -> None:
        """A directory is gone."""
        for path in self._below(directory):
            del self.lengths[path]

    def _below(self, directory: str) -> list[str]:
        return [path for path in self.lengths if path.startswith(f"{directory}/")]


def _shown(found: int | None, expected: int | None) -> str:
    if found is None:
        return "missing"
    return f"{found} bytes" if expected is None else f"{found} bytes instead of {expected}"
