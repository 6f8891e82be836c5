"""What a checkpoint is made of: the files of a shard as they are at one position of its log."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from headrace.storage.replicated.keys import Position


class SnapshotFile(Protocol):
    """A file of a snapshot."""

    @property
    def path(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def data_end(self) -> int: ...
    @property
    def is_overwritten(self) -> bool: ...
    @property
    def is_torn(self) -> bool: ...
    @property
    def identity(self) -> object: ...


F = TypeVar("F", bound=SnapshotFile)


class ShardSnapshot(Protocol[F]):
    """The files of a shard as they are at one position of its log, while the owner goes on writing: a FrozenTree."""

    @property
    def position(self) -> Position: ...
    @property
    def files(self) -> Sequence[F]: ...
    @property
    def directories(self) -> Sequence[str]: ...
    @property
    def bindings(self) -> Mapping[int, str]: ...
    def read(self, file: F, position: int, length: int) -> bytes: ...
    def report_damage(self, file: F, position: int, reason: str) -> None: ...  # raises, unless the store has the same
