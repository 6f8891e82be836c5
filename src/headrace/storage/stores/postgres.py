"""A shared store in a table of PostgreSQL."""

import re
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument, StoreUnavailable
from headrace.storage.stores.address import StoreAddress
from headrace.storage.stores.advice import with_advice
from headrace.storage.stores.store import (
    KeyExists,
    SharedStore,
    StoredObject,
    VersionMismatch,
    check_object,
    prefix_end,
)

TABLE = "headrace_objects"
CONNECTIONS = 8
PASSED_ON = (
    *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "channel_binding", "gssencmode", "krbsrvname"),
    *("target_session_attrs", "load_balance_hosts", "passfile", "service", "application_name", "client_encoding"),
)
"""Options of the URL that are libpq's."""
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,50}(\.[a-z_][a-z0-9_]{0,50})?", re.ASCII)
_INTERVAL_S = 0.1
"""How often psycopg looks around while it waits for an answer."""
_SETTINGS = ("fsync", "full_page_writes", "synchronous_commit", "synchronous_standby_names")

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]


class PostgresTableStore(SharedStore):
    """A store in one table, which it makes if there is none; a statement is a transaction.

    It keeps up to `connections` connections, and replaces those that break. A statement takes at most `timeout_s`.
    """

    reads_at_once = 32

    def __init__(
        self,
        location: str,
        parameters: dict[str, Any],
        *,
        table: str = TABLE,
        timeout_s: float = 10.0,
        connections: int = CONNECTIONS,
    ) -> None:
        """Keep the parameters of libpq; the first request connects."""
        if not _NAME.fullmatch(table):
            raise InvalidArgument(f"a table is a lower-case name such as {TABLE} or schema.{TABLE}, not {shown(table)}")
        self._location = location
        self._parameters = parameters
        self._timeout_s = timeout_s
        self._table = table
        self._statements = _Statements(table)
        self._room = threading.BoundedSemaphore(connections)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._has_table = False
        self._closed = False

    @property
    def location(self) -> str:
        """Where it is."""
        return self._location

    def put_new(self, key: str, data: bytes) -> None:
        """Create an object; raises KeyExists if there is one."""
        check_object(key, data)
        if self._run(lambda connection: connection.execute(self._statements.insert, (key, data)).rowcount) == 0:
            raise KeyExists(key)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace an object if it has this version; returns the new version."""
        check_object(key, data)
        if not (version.isascii() and version.isdigit()):
            raise VersionMismatch(key)
        arguments = (data, key, int(version))
        row = self._run(lambda connection: connection.execute(self._statements.update, arguments).fetchone())
        if row is None:
            raise VersionMismatch(key)
        return str(row[0])

    def get(self, key: str) -> StoredObject | None:
        """Read an object; None if there is none."""
        row = self._read(lambda connection: connection.execute(self._statements.select, (key,), binary=True).fetchone())
        return None if row is None else StoredObject(bytes(row[1]), str(row[0]))

    def get_many(self, keys: Sequence[str]) -> list[StoredObject | None]:
        """Read several objects, with one statement."""
        arguments = (list(keys),)
        rows = self._read(
            lambda connection: connection.execute(self._statements.select_many, arguments, binary=True).fetchall()
        )
        found = {key: StoredObject(bytes(data), str(version)) for key, version, data in rows}
        return [found.get(key) for key in keys]

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        """The first keys with a prefix behind `after`."""
        end = prefix_end(prefix) if prefix else None
        arguments = (after, prefix, end, end, count_max)
        rows = self._read(lambda connection: connection.execute(self._statements.names, arguments).fetchall())
        return [row[0] for row in rows]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        self._run(lambda connection: connection.execute(self._statements.delete, (list(keys),)))

    def remarks(self) -> list[str]:
        """What the server's settings say of how it may lose what it has confirmed."""
        statement = "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)"
        rows = self._read(lambda connection: connection.execute(statement, (list(_SETTINGS),)).fetchall())
        return _remarks(dict(rows))

    def close(self) -> None:
        """Close the connections that nobody uses; the others close when they are given back."""
        with self._lock:
            self._closed = True
        self._drop_idle()

    def _read(self, call: Callable[[Connection], T]) -> T:
        """Run a statement that changes nothing; again if its connection had broken before."""
        try:
            return self._run(call)
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, psycopg.OperationalError) or self._closed:
                raise
            return self._run(call)

    def _run(self, call: Callable[[Connection], T]) -> T:
        with self._room:
            try:
                connection = self._take()
                try:
                    result = call(connection)
                except BaseException:
                    connection.close()  # what it waits for is unknown
                    raise
            except psycopg.Error as error:
                self._drop_idle()  # what broke one has likely broken them all
                raise StoreUnavailable(f"the store {self._location} failed: {_told(error)}") from error
            self._give_back(connection)
            return result

    def _take(self) -> Connection:
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"the store {self._location} is closed")
            if self._idle:
                return self._idle.pop()
        connection = _LimitedConnection.connect(**self._parameters, autocommit=True)
        try:
            connection.quiet_max = round(self._timeout_s / _INTERVAL_S) + 10
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: Connection) -> None:
        """Set what statements rely on, and make the table if there is none."""
        connection.execute(
            "SELECT set_config('statement_timeout', %s, false), "
            "set_config('default_transaction_isolation', 'read committed', false), "
            # Whoever has switched it off for a database did not think of this one.
            "set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') "
            "THEN 'on' ELSE current_setting('synchronous_commit') END, false)",
            (str(round(self._timeout_s * 1000)),),
        )
        if self._has_table:
            return
        found = connection.execute("SELECT to_regclass(%s)", (self._table,)).fetchone()
        if found is None or found[0] is None:
            with connection.transaction():
                # Two nodes that create a table at the same time get an error of the catalogue.
                connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"headrace:{self._table}",))
                for statement in self._statements.create:
                    connection.execute(statement)
        self._has_table = True

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class _LimitedConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that gives up when the server is silent, as one is that was stopped or cut off."""

    quiet_max = 0
    """How many intervals may pass without a word of the server; 0: any number."""

    def wait(self, gen: Any, *arguments: Any, **named: Any) -> Any:
        """Consume a generator of psycopg, up to the limit."""
        return super().wait(_limited(gen, self.quiet_max) if self.quiet_max else gen, *arguments, **named)


def _limited(inner: Generator[Any, Any, T], quiet_max: int) -> Generator[Any, Any, T]:
    quiet = 0
    try:
        state = next(inner)
        while True:
            ready = yield state
            quiet = 0 if ready else quiet + 1
            if quiet >= quiet_max:
                raise psycopg.OperationalError("the server did not answer in time")
            state = inner.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


class _Statements:
    """The statements for one table."""

    def __init__(self, table: str) -> None:
        names = {
            "table": sql.Identifier(*table.split(".")),
            "versions": sql.Identifier(*f"{table}_versions".split(".")),
        }
        next_version = sql.SQL("nextval({})").format(sql.Literal(f"{table}_versions"))

        def statement(text: str) -> sql.Composed:
            return sql.SQL(text).format(**names, next=next_version)

        self.create = [
            statement("CREATE SEQUENCE IF NOT EXISTS {versions}"),
            statement(
                'CREATE TABLE IF NOT EXISTS {table} (key text COLLATE "C" PRIMARY KEY, version bigint NOT NULL, '
                "data bytea NOT NULL)"
            ),
            # Messages are compressed already, or not meant to be.
            statement("ALTER TABLE {table} ALTER COLUMN data SET STORAGE EXTERNAL"),
        ]
        self.insert = statement(
            "INSERT INTO {table} (key, version, data) VALUES (%s, {next}, %b) ON CONFLICT (key) DO NOTHING"
        )
        self.update = statement(
            "UPDATE {table} SET data = %b, version = {next} WHERE key = %s AND version = %s RETURNING version"
        )
        self.select = statement("SELECT version, data FROM {table} WHERE key = %s")
        self.select_many = statement("SELECT key, version, data FROM {table} WHERE key = ANY(%s)")
        self.names = statement(
            "SELECT key FROM {table} WHERE key > %s AND key >= %s AND (%s::text IS NULL OR key < %s) "
            "ORDER BY key LIMIT %s"
        )
        self.delete = statement("DELETE FROM {table} WHERE key = ANY(%s)")


def open_postgres(address: StoreAddress) -> PostgresTableStore:
    """The store in a database; its password comes from PGPASSWORD, .pgpass or the credentials file."""
    address.check_options("table", "timeout", "connections", *PASSED_ON)
    timeout_s = address.seconds()
    parameters: dict[str, Any] = {
        "application_name": "headrace",
        "connect_timeout": max(2, round(timeout_s)),  # in whole seconds; less than 2 is not allowed
        "tcp_user_timeout": round(timeout_s * 1000),
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        **{name: value for name, value in address.options.items() if name in PASSED_ON},
    }
    told = {"host": address.host, "port": address.port, "user": address.user, "dbname": address.path.strip("/")}
    parameters.update({name: value for name, value in told.items() if value})
    for name, variable in (("user", "PGUSER"), ("password", "PGPASSWORD")):
        if name not in parameters and address.secrets.get(variable):
            parameters[name] = address.secrets[variable]
    return PostgresTableStore(
        address.location,
        parameters,
        table=address.options.get("table", TABLE),
        timeout_s=timeout_s,
        connections=address.count("connections", CONNECTIONS, 100),
    )


open_postgres.api = 1  # type: ignore[attr-defined]


def _told(error: psycopg.Error) -> str:
    return with_advice(str(error) or type(error).__name__)


def _remarks(settings: dict[str, str]) -> list[str]:
    found = []
    for name in ("fsync", "full_page_writes"):
        if settings.get(name) == "off":
            found.append(
                f"PostgreSQL has {name} = off: a power loss of its machine loses or damages what it has confirmed; "
                "switch it on"
            )
    if not settings.get("synchronous_standby_names"):
        found.append(
            "PostgreSQL has no synchronous standbys: what it has confirmed is lost with its disk, or when it fails "
            "over to an asynchronous standby; set synchronous_standby_names"
        )
    elif settings.get("synchronous_commit") == "remote_write":
        found.append(
            "PostgreSQL has synchronous_commit = remote_write: a crash of the standby's machine may lose what was "
            "confirmed; set it to on"
        )
    return found
