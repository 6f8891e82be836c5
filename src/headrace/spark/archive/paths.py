"""Where archives are: paths and URLs, which pyarrow writes to and reads from."""

import importlib.util
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from headrace.model.errors import InvalidArgument
from headrace.model.names import file_name

_LOCAL = "file://"
_PYARROWS = {"s3a": "s3", "s3n": "s3"}
"""Hadoop's names of schemes, and pyarrow's."""
_OBJECT_STORES: tuple[type, ...] = tuple(
    getattr(fs, name) for name in ("S3FileSystem", "GcsFileSystem") if hasattr(fs, name)
)


class ArchivePath(NamedTuple):
    """A directory or a file somewhere, as pyarrow has it."""

    filesystem: fs.FileSystem
    path: str

    def below(self, *names: str) -> "ArchivePath":
        """Something in it."""
        return ArchivePath(self.filesystem, "/".join([self.path.rstrip("/"), *names]))

    @property
    def parent(self) -> "ArchivePath":
        """The directory that it is in."""
        return ArchivePath(self.filesystem, self.path.rpartition("/")[0])

    @property
    def local(self) -> bool:
        """Whether it is on this machine's disk."""
        return isinstance(self.filesystem, fs.LocalFileSystem)


def archive_url(given: str) -> str:
    """The path or URL that the user gave as one that means the same everywhere."""
    if not given:
        raise InvalidArgument("say where the archive is: a path or a URL")
    scheme, password = urlsplit(given).scheme, urlsplit(given).password
    if scheme and password is not None:
        raise InvalidArgument(
            "an archive's URL is kept beside its files and in the broker, so it has no password: give the credentials "
            "by the environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not scheme or len(scheme) == 1:
        return _LOCAL + os.path.abspath(given)
    if scheme == "file":
        return _LOCAL + os.path.abspath("/" + given.removeprefix("file:").lstrip("/"))
    return given.rstrip("/")


@lru_cache(maxsize=64)
def place_of(url: str) -> ArchivePath:
    """Where a URL leads; raises InvalidArgument that says what to do if pyarrow does not know it."""
    if url.startswith(_LOCAL):  # as Hadoop has it: what looks like %20 is no space
        return ArchivePath(fs.LocalFileSystem(), url.removeprefix(_LOCAL))
    scheme, colon, rest = url.partition(":")
    spoken = _PYARROWS.get(scheme, scheme) + colon + rest
    try:
        return ArchivePath(*fs.FileSystem.from_uri(spoken))
    except (pa.ArrowInvalid, NotImplementedError) as error:
        found = _by_fsspec(url)
        if found is not None:
            return found
        raise InvalidArgument(
            f"pyarrow, by which archived messages are read, cannot read {scheme}: URLs ({error}). It can file, s3 "
            "(also s3a), gs, abfs and hdfs ones; with `pip install fsspec` and the package of that scheme also others"
        ) from error
    except OSError as error:
        raise InvalidArgument(f"{url} cannot be reached by pyarrow: {error}") from error


def _by_fsspec(url: str) -> ArchivePath | None:
    if importlib.util.find_spec("fsspec") is None:
        return None
    from fsspec.core import url_to_fs  # type: ignore[import-not-found, import-untyped, unused-ignore]

    try:
        filesystem, path = url_to_fs(url)
    except (ValueError, ImportError):
        return None
    return ArchivePath(fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path)


def file_url(url: str, path: str) -> str:
    """The URL of a file below an archive's, whose settings, behind a question mark, it leaves out.

    >>> file_url("s3://company/archive?endpoint_override=127.0.0.1:9000&scheme=http", "a/b.parquet")
    's3://company/archive/a/b.parquet'
    """
    base = url if url.startswith(_LOCAL) else url.partition("?")[0]
    return f"{base.rstrip('/')}/{path}"


def make_directory(place: ArchivePath) -> None:
    """Make a directory with those above it; a store of objects has none."""
    if not isinstance(place.filesystem, _OBJECT_STORES):
        place.filesystem.create_dir(place.path, recursive=True)


def names_below(place: ArchivePath) -> list[str]:
    """The names of what is in a directory; nothing if there is none."""
    selector = fs.FileSelector(place.path, allow_not_found=True)
    return sorted(found.base_name for found in place.filesystem.get_file_info(selector))


def files_below(place: ArchivePath) -> Iterator[tuple[str, int]]:
    """The Parquet files in a directory, with their sizes."""
    selector = fs.FileSelector(place.path, allow_not_found=True)
    for found in place.filesystem.get_file_info(selector):
        if found.type is fs.FileType.File and found.base_name.endswith(".parquet"):
            yield found.base_name, found.size


def size_of(place: ArchivePath) -> int | None:
    """How many bytes a file has; None if there is none."""
    found = place.filesystem.get_file_info(place.path)
    return found.size if found.type is fs.FileType.File else None


def remove_directory(place: ArchivePath) -> None:
    """Remove a directory with all that is in it, if it is there."""
    if place.filesystem.get_file_info(place.path).type is fs.FileType.Directory:
        place.filesystem.delete_dir(place.path)


def write_whole(place: ArchivePath, content: bytes) -> None:
    """Write a small file, all of it or nothing, and so that it lasts."""
    directory = place.parent.path
    make_directory(place.parent)
    if not place.local:  # a store of objects shows them when they are whole
        with place.filesystem.open_output_stream(place.path) as stream:
            stream.write(content)
        return
    new = f"{place.path}.{secrets.token_hex(4)}.new"  # others may write the same file at the same time
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, place.path)
    sync_path(directory, directory)


def read_whole(place: ArchivePath) -> bytes:
    """A small file."""
    with place.filesystem.open_input_stream(place.path) as stream:
        return bytes(stream.read())


def sync_path(path: str, root: str) -> None:
    """Have a file of this machine last through a power loss, with the directories that it is in, up to a root's."""
    above = os.path.dirname(root.rstrip("/")) or "/"
    while len(path) > len(above):
        _sync(path)
        path = os.path.dirname(path)
    with suppress(PermissionError):  # which is somebody else's, and there for long
        _sync(above)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def archive_folder(topic: str) -> str:
    """Where the archives of all topics of a name are."""
    return f"topic={file_name(topic)}"


def topic_folder(topic: str, broker_id: str, topic_id: int) -> str:
    """Where a topic's archive is below the archive's URL: a topic made again, or another broker's, is elsewhere."""
    return f"{archive_folder(topic)}/id={broker_id}-{topic_id}"


def manifest_copy(number: int, revision: int) -> str:
    """What the copy of an entry of the manifest is called, in the directory `_manifest` of a topic's folder."""
    return f"{number:08d}.{revision}.json" if revision else f"{number:08d}.json"
