"""Paths and URLs of archives, which pyarrow reads and writes."""

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
"""Maps Hadoop's names of URL schemes to pyarrow's."""
_OBJECT_STORES: tuple[type, ...] = tuple(
    getattr(fs, name) for name in ("S3FileSystem", "GcsFileSystem") if hasattr(fs, name)
)


class ArchivePath(NamedTuple):
    """A directory or file in a pyarrow file system."""

    filesystem: fs.FileSystem
    path: str

    def below(self, *names: str) -> "ArchivePath":
        """Return a path below this one."""
        return ArchivePath(self.filesystem, "/".join([self.path.rstrip("/"), *names]))

    @property
    def parent(self) -> "ArchivePath":
        """The parent directory."""
        return ArchivePath(self.filesystem, self.path.rpartition("/")[0])

    @property
    def local(self) -> bool:
        """Whether the path is in the local file system."""
        return isinstance(self.filesystem, fs.LocalFileSystem)


def archive_url(given: str) -> str:
    """Return a user's path or URL as a URL that does not depend on the working directory."""
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
def resolve_url(url: str) -> ArchivePath:
    """Return the path of a URL; raises InvalidArgument if neither pyarrow nor fsspec supports its scheme."""
    if url.startswith(_LOCAL):  # like Hadoop, without decoding %20
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
    """Return the URL of a file of an archive, without the query string of the archive's URL.

    >>> file_url("s3://company/archive?endpoint_override=127.0.0.1:9000&scheme=http", "a/b.parquet")
    's3://company/archive/a/b.parquet'
    """
    base = url if url.startswith(_LOCAL) else url.partition("?")[0]
    return f"{base.rstrip('/')}/{path}"


def make_directory(location: ArchivePath) -> None:
    """Create a directory with its parents; does nothing in an object store."""
    if not isinstance(location.filesystem, _OBJECT_STORES):
        location.filesystem.create_dir(location.path, recursive=True)


def names_below(location: ArchivePath) -> list[str]:
    """Return the names in a directory; an empty list if it does not exist."""
    selector = fs.FileSelector(location.path, allow_not_found=True)
    return sorted(found.base_name for found in location.filesystem.get_file_info(selector))


def files_below(location: ArchivePath) -> Iterator[tuple[str, int]]:
    """Yield the Parquet files in a directory, with their sizes."""
    selector = fs.FileSelector(location.path, allow_not_found=True)
    for found in location.filesystem.get_file_info(selector):
        if found.type is fs.FileType.File and found.base_name.endswith(".parquet"):
            yield found.base_name, found.size


def size_of(location: ArchivePath) -> int | None:
    """Return the size of a file, or None if it does not exist."""
    found = location.filesystem.get_file_info(location.path)
    return found.size if found.type is fs.FileType.File else None


def remove_directory(location: ArchivePath) -> None:
    """Remove a directory with its contents, if it exists."""
    if location.filesystem.get_file_info(location.path).type is fs.FileType.Directory:
        location.filesystem.delete_dir(location.path)


def write_whole(location: ArchivePath, content: bytes) -> None:
    """Write a small file atomically and durably."""
    directory = location.parent.path
    make_directory(location.parent)
    if not location.local:  # an object store shows an object only when it is complete
        with location.filesystem.open_output_stream(location.path) as stream:
            stream.write(content)
        return
    new = f"{location.path}.{secrets.token_hex(4)}.new"  # another process may write the same file concurrently
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, location.path)
    sync_path(directory, directory)


def read_whole(location: ArchivePath) -> bytes:
    """Read a small file."""
    with location.filesystem.open_input_stream(location.path) as stream:
        return bytes(stream.read())


def sync_path(path: str, root: str) -> None:
    """Fsync a local file and its parent directories, up to and including the root's parent."""
    above = os.path.dirname(root.rstrip("/")) or "/"
    while len(path) > len(above):
        _sync(path)
        path = os.path.dirname(path)
    with suppress(PermissionError):  # it belongs to another user and existed before
        _sync(above)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def archive_folder(topic: str) -> str:
    """Return the folder of the archives of all topics of a name."""
    return f"topic={file_name(topic)}"


def topic_folder(topic: str, broker_id: str, topic_id: int) -> str:
    """Return the folder of a topic's archive, unique per broker and topic id, below the archive's URL."""
    return f"{archive_folder(topic)}/id={broker_id}-{topic_id}"


def manifest_copy(number: int, revision: int) -> str:
    """Return the file name of the copy of a manifest entry, in the directory `_manifest` of a topic's folder."""
    return f"{number:08d}.{revision}.json" if revision else f"{number:08d}.json"
