"""Projections into SQLite, which comes with Python."""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.client.projection.position_store import (
    CREATE_TABLE,
    PositionKey,
    Positions,
    PositionStore,
    StoredPosition,
    checked_position,
)
from headrace.model.arguments import check_path
from headrace.model.errors import HandlerEndedTransaction


class SqliteStore(PositionStore[sqlite3.Connection]):
    """A SQLite database for projections; handlers get a `sqlite3.Connection` in a transaction.

    Example:
        >>> store = headrace.SqliteStore(":memory:")
        >>> store.positions("totals")
        {}
        >>> store.close()
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 30.0) -> None:
        """Open a database, created if it does not exist; waits so many seconds while another process writes to it."""
        check_path(path, "a projection's data")
        # Transactions are begun here, not by the module; each thread of an asyncio program may have its turn.
        self._connection = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
        self._connection.execute(CREATE_TABLE)
        self._lock = threading.Lock()
        """Held for a transaction: a cancelled task leaves its thread to end it."""

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection, for making tables and reading them."""
        return self._connection

    def positions(self, projection: str) -> Positions:
        """Return the positions of a projection.

        Parameters:
            projection: its name.

        Returns:
            By topic and partition: the offset of the first message that was not applied, and the topic's id.

        Raises:
            sqlite3.Error: if the database fails.

        Example:
            >>> headrace.SqliteStore(":memory:").positions("totals")
            {}
        """
        rows = self._connection.execute(
            "SELECT topic, partition, next_offset, topic_id FROM headrace_positions WHERE projection = ?", (projection,)
        )
        return {(topic, partition): StoredPosition(*position) for topic, partition, *position in rows}

    def apply(
        self,
        key: PositionKey,
        expected: StoredPosition | None,
        following: StoredPosition,
        write: Callable[[sqlite3.Connection], object],
    ) -> None:
        """Call `write` and store a position in one transaction; projections use it.

        Parameters:
            key: whose position.
            expected: what it must be now; None: not stored yet.
            following: what it becomes.
            write: writes what goes with it.

        Raises:
            HandlerEndedTransaction: if `write` has committed or rolled back.
            sqlite3.Error: if the database fails; nothing was written.

        Example:
            >>> from headrace.client.projection.position_store import PositionKey, StoredPosition
            >>> store = headrace.SqliteStore(":memory:")
            >>> store.apply(PositionKey("totals", "orders", 0), None, StoredPosition(7, 1), lambda connection: None)
            >>> store.positions("totals")
            {('orders', 0): StoredPosition(next_offset=7, topic_id=1)}
        """
        with self._transaction() as connection:
            row = connection.execute(
                "SELECT next_offset, topic_id FROM headrace_positions "
                "WHERE projection = ? AND topic = ? AND partition = ?",
                key,
            ).fetchone()
            checked_position(row, expected)
            write(connection)
            if not connection.in_transaction:
                raise HandlerEndedTransaction
            connection.execute(
                "INSERT INTO headrace_positions (projection, topic, partition, next_offset, topic_id) "
                "VALUES (?, ?, ?, ?, ?) ON CONFLICT (projection, topic, partition) "
                "DO UPDATE SET next_offset = excluded.next_offset, topic_id = excluded.topic_id",
                (*key, *following),
            )

    def reset(self, projection: str, write: Callable[[sqlite3.Connection], object]) -> None:
        """Call `write` and forget all positions of a projection in one transaction.

        Parameters:
            projection: its name.
            write: empties the tables of the projection.

        Raises:
            sqlite3.Error: if the database fails; nothing was changed.

        Example:
            >>> headrace.SqliteStore(":memory:").reset("totals", lambda connection: None)
        """
        with self._transaction() as connection:
            connection.execute("DELETE FROM headrace_positions WHERE projection = ?", (projection,))
            write(connection)
            if not connection.in_transaction:
                raise HandlerEndedTransaction

    def close(self) -> None:
        """Close the database.

        Raises:
            sqlite3.Error: if the database fails.

        Example:
            >>> headrace.SqliteStore(":memory:").close()
        """
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the lock for writing from the first look on, so that nobody writes between it and the last."""
        connection = self._connection
        with self._lock:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
