"""Projections into PostgreSQL, with psycopg."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.client.projection.position_store import (
    CREATE_TABLE,
    PositionKey,
    Positions,
    PositionStore,
    StoredPosition,
    checked_position,
)
from headrace.model.errors import HandlerEndedTransaction, InvalidArgument

if TYPE_CHECKING:
    pass

_FIND = "SELECT next_offset, topic_id FROM headrace_positions WHERE projection = %s AND topic = %s AND partition = %s"
_STORE = """
INSERT INTO headrace_positions AS old (projection, topic, partition, next_offset, topic_id) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (projection, topic, partition) DO UPDATE SET next_offset = {following}, topic_id = excluded.topic_id
"""
_STORE_POSITION = _STORE.format(following="excluded.next_offset")
_ADVANCE_POSITION = _STORE.format(following="greatest(old.next_offset, excluded.next_offset)")
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('headrace_positions/' || %s, 0))"


class PostgresStore(PositionStore[Any]):
    """A PostgreSQL database for projections; handlers get a `psycopg.Connection` in a transaction.

    Example:
        >>> store = headrace.PostgresStore("postgresql://shop@db/shop")  # doctest: +SKIP
    """

    def __init__(self, conninfo: str, **options: Any) -> None:
        """Connect to a database; the options are those of `psycopg.connect`."""
        try:
            import psycopg
        except ImportError as error:
            raise InvalidArgument(
                "projections into PostgreSQL need psycopg: `pip install 'psycopg[binary]'` installs it"
            ) from error
        self._connect: Callable[[], Any] = lambda: psycopg.connect(conninfo, autocommit=True, **options)
        self._connection: psycopg.Connection[Any] = self._connect()
        self._lock = threading.Lock()
        """Held for a transaction: a cancelled task leaves its thread to end it."""
        with self._transaction("") as connection:
            connection.execute(CREATE_TABLE)

    @property
    def connection(self) -> Any:
        """The connection, for making tables and reading them; another one after the database was away."""
        if self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def positions(self, projection: str) -> Positions:
        """Return the positions of a projection.

        Parameters:
            projection: its name.

        Returns:
            By topic and partition: the offset of the first message that was not applied, and the topic's id.

        Raises:
            psycopg.Error: if the database fails.

        Example:
            >>> store = headrace.PostgresStore("postgresql://shop@db/shop")  # doctest: +SKIP
            >>> store.positions("totals")  # doctest: +SKIP
            {}
        """
        rows = self.connection.execute(
            "SELECT topic, partition, next_offset, topic_id FROM headrace_positions WHERE projection = %s",
            (projection,),
        ).fetchall()
        return {(topic, partition): StoredPosition(*position) for topic, partition, *position in rows}

    def apply(
        self,
        key: PositionKey,
        expected: StoredPosition | None,
        following: StoredPosition,
        write: Callable[[Any], object],
    ) -> None:
        """Call `write` and store a position in one transaction; projections use it.

        Parameters:
            key: whose position.
            expected: what it must be now; None: not stored yet.
            following: what it becomes.
            write: writes what goes with it.

        Raises:
            HandlerEndedTransaction: if `write` has committed or rolled back.
            psycopg.Error: if the database fails; nothing was written.

        Example:
            >>> store.apply(key, None, StoredPosition(7, 1), lambda connection: None)  # doctest: +SKIP
        """
        with self._transaction(key.projection) as connection:
            checked_position(connection.execute(_FIND, key).fetchone(), expected)
            write(connection)
            _check_open(connection)
            connection.execute(_STORE_POSITION, (*key, *following))

    def advance(self, projection: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Store how far a projection is whose writes may be repeated, such as one of Spark; positions never go back.

        Parameters:
            projection: its name.
            offsets: by topic and partition: the offset of the first message that was not applied.

        Raises:
            psycopg.Error: if the database fails; nothing was written.

        Example:
            >>> store.advance("orders", {("order-events", 0): 17})  # doctest: +SKIP
        """
        with self._transaction(projection) as connection:
            for (topic, partition), next_offset in sorted(offsets.items()):
                connection.execute(_ADVANCE_POSITION, (projection, topic, partition, next_offset, 0))

    def reset(self, projection: str, write: Callable[[Any], object]) -> None:
        """Call `write` and forget all positions of a projection in one transaction.

        Parameters:
            projection: its name.
            write: empties the tables of the projection.

        Raises:
            psycopg.Error: if the database fails; nothing was changed.

        Example:
            >>> store.reset("totals", lambda connection: None)  # doctest: +SKIP
        """
        with self._transaction(projection) as connection:
            connection.execute("DELETE FROM headrace_positions WHERE projection = %s", (projection,))
            write(connection)
            _check_open(connection)

    def close(self) -> None:
        """Close the connection.

        Raises:
            psycopg.Error: if the database fails.

        Example:
            >>> store.close()  # doctest: +SKIP
        """
        self._connection.close()

    @contextmanager
    def _transaction(self, projection: str) -> Iterator[Any]:
        """Hold the projection's lock from the first look on, so that no other instance writes before the end."""
        connection = self.connection
        with self._lock:
            connection.execute("BEGIN")
            try:
                connection.execute(_LOCK, (projection,))
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if not connection.closed and not connection.broken:
                    connection.execute("ROLLBACK")
                raise


def _check_open(connection: Any) -> None:
    """Raise if a handler has ended the transaction."""
    import psycopg

    if connection.info.transaction_status != psycopg.pq.TransactionStatus.INTRANS:
        raise HandlerEndedTransaction
