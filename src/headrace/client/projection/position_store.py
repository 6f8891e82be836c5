"""Where a projection is: the table `headrace_positions`, in the database that its handler writes to."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Self, TypeVar

DatabaseConnection = TypeVar("DatabaseConnection")

CREATE_TABLE = """
CREATE TABLE IF NOT EXISTS headrace_positions (
  projection text NOT NULL, topic text NOT NULL, partition bigint NOT NULL,
  topic_id bigint NOT NULL, next_offset bigint NOT NULL,
  PRIMARY KEY (projection, topic, partition)
)
"""
"""The same in every database, and for projections of Spark."""


class PositionMoved(Exception):
    """Another instance of the projection has applied the messages: this one wrote nothing, and reads its positions."""


class StoredPosition(NamedTuple):
    """How far a projection is in a partition."""

    next_offset: int
    """The offset of the first message that it has not applied."""
    topic_id: int
    """Of the topic at that time: one that is made again under the same name has another. 0: not known."""


class PositionKey(NamedTuple):
    """Whose position: a projection's in a partition."""

    projection: str
    topic: str
    partition: int


Positions = dict[tuple[str, int], StoredPosition]
"""By topic and partition."""


class PositionStore(ABC, Generic[DatabaseConnection]):
    """A database with the tables of projections. A projection calls it from one thread at a time."""

    @abstractmethod
    def positions(self, projection: str) -> Positions:
        """Return the positions of a projection; makes the table if there is none."""

    @abstractmethod
    def apply(
        self,
        key: PositionKey,
        expected: StoredPosition | None,
        following: StoredPosition,
        write: Callable[[DatabaseConnection], object],
    ) -> None:
        """Call `write` and store a position in one database transaction.

        Raises PositionMoved, with nothing written, if the stored position is not the expected one. Until the
        transaction ends, no other instance can apply anything.
        """

    @abstractmethod
    def reset(self, projection: str, write: Callable[[DatabaseConnection], object]) -> None:
        """Call `write` and forget all positions of a projection in one database transaction."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection to the database."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def checked_position(found: tuple[Any, ...] | None, expected: StoredPosition | None) -> None:
    """Raise PositionMoved if a row is not the expected one."""
    if (None if found is None else StoredPosition(*found)) != expected:
        raise PositionMoved
