"""PostgreSQL as a work queue: a table, an index, and SELECT ... FOR UPDATE SKIP LOCKED, with psycopg."""

import asyncio
import contextlib
import functools
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import installing
from headrace.bench.event_loop import run_async
from headrace.bench.measure import Unavailable, check
from headrace.bench.queues import BATCH, Dated, Take, Worked, WorkQueue
from headrace.bench.receiver import Arrived, Receive
from headrace.bench.servers import HOST, ServerNode, answers, free_port

_USER = "bench"
_POLL_S = 0.001
_SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    # Rows that are updated and deleted all the time need more care than the default, once a minute.
    "autovacuum_naptime": "1s",
    "autovacuum_vacuum_cost_delay": "0",
    "dynamic_shared_memory_type": "mmap",
}
_SSL_REQUEST, _SSL_REFUSED = b"\x00\x00\x00\x08\x04\xd2\x16\x2f", b"N"
_NOW = "(SELECT (extract(epoch FROM statement_timestamp()) * 1000000)::bigint)"
"""Told once in a statement: else the index could not be used to stop at what is not due yet."""
_FIRST = "SELECT id FROM {queue} WHERE due <= {now} AND until <= {now} ORDER BY due, id LIMIT {count}"
_LEASE = (
    "WITH first AS (" + _FIRST + " FOR UPDATE SKIP LOCKED) "
    "UPDATE {queue} SET until = {now} + 30000000 FROM first WHERE {queue}.id = first.id "
    "RETURNING {queue}.id, {queue}.value"
)
_HOLD = "SELECT id, value FROM {queue} WHERE due <= {now} ORDER BY due, id LIMIT {count} FOR UPDATE SKIP LOCKED"
_ACK = "DELETE FROM {queue} WHERE id = ANY(%s)"


class PostgresNode(ServerNode):
    """One PostgreSQL server, with its data near the place that it is given: it does not run as root."""

    port = 0

    def __init__(self) -> None:
        super().__init__()
        self._home: Path | None = None

    def find(self) -> None:
        """Make sure of the server and the client."""
        _program("postgres")
        _user()
        installing.wheel("psycopg", "psycopg[binary]")

    def _start(self, place: str, *, synced: bool) -> None:
        del synced  # It always is.
        self._home = _home(place)
        data = str(self._home / "data")
        made = subprocess.run(
            [*_user(), _program("initdb"), "--no-sync", "-A", "trust", "-U", _USER, "--locale=C", "-E", "UTF8", data],
            cwd=self._home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise Unavailable(f"initdb failed: {made.stderr[-500:].strip()}")
        self.port = free_port()
        command = [*_user(), _program("postgres"), "-D", data, "-p", str(self.port)]
        for name, value in _SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        self._launch(command, str(self._home), self._answers)

    def _answers(self) -> bool:
        import psycopg

        if not answers(self.port, _SSL_REQUEST, _SSL_REFUSED):
            return False
        with contextlib.suppress(psycopg.OperationalError), connect(self.port):
            return True
        return False

    def _stop(self) -> None:
        while self._servers:
            # Gently: it would leave shared memory behind.
            self._servers.pop().stop(gently=True)
        if self._home is not None:
            shutil.rmtree(self._home)
            self._home = None

    @property
    def address(self) -> str:
        """What clients connect to."""
        return f"postgresql://{_USER}@{HOST}:{self.port}/postgres"


@functools.cache
def _program(name: str) -> str:
    """The path of a program of the server, which Debian keeps out of the way."""
    if (found := _found(name)) is None:
        installing.debian_program("pg_ctlcluster", "postgresql")
        found = _found(name)
    if found is None:
        raise Unavailable(f"there is no {name}")
    return found


def _found(name: str) -> str | None:
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda place: int(place.parent.name), reverse=True)
    return shutil.which(name, path=os.pathsep.join([*map(str, places), os.environ.get("PATH", "")]))


@functools.cache
def _user() -> tuple[str, ...]:
    """What to write before a command so that it does not run as root, which the server refuses."""
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        raise Unavailable("it does not run as root, and there is no setpriv to start it as somebody else")
    who = _not_root()
    return "setpriv", f"--reuid={who.pw_uid}", f"--regid={who.pw_gid}", "--clear-groups", "--"


def _not_root() -> pwd.struct_passwd:
    names = {user.pw_name for user in pwd.getpwall()}
    return pwd.getpwnam("postgres" if "postgres" in names else "nobody")


def _home(place: str) -> Path:
    """A directory for whoever runs the server, as near to the place as that user may go."""
    if os.geteuid() != 0:
        return Path(tempfile.mkdtemp(prefix="postgres-", dir=place))
    path = Path(place).resolve()
    reachable = next(one for one in path.parents if all(_is_open(above) for above in (one, *one.parents)))
    home = Path(tempfile.mkdtemp(prefix="headrace-postgres-", dir=reachable))
    who = _not_root()
    os.chown(home, who.pw_uid, who.pw_gid)
    return home


def _is_open(directory: Path) -> bool:
    return bool(directory.stat().st_mode & 0o001)


def connect(port: int, **more: Any) -> Any:
    """A connection that commits each statement by itself, unless told otherwise."""
    import psycopg

    return psycopg.connect(host=HOST, port=port, user=_USER, dbname="postgres", autocommit=True, **more)


class Postgres(WorkQueue):
    """Leases are kept in the table, so that they outlive connections and the server, as Headrace's do."""

    name = "postgres"
    words: ClassVar[str] = "synced: fsync=on, synchronous_commit=on: enqueued, leased, acked; one commit each"
    api: ClassVar[Mapping[str, str]] = {
        "enqueue": "psycopg binary COPY of a batch, each committed",
        "batches": f"UPDATE ... (SELECT ... LIMIT {BATCH} FOR UPDATE SKIP LOCKED) RETURNING, then DELETE ... = ANY",
        "singles": "the same for one message, AsyncConnection, a connection a consumer, all in one process (uvloop)",
        "timeline": f"due times in the index; polled without a pause while something is due, else every {_POLL_S:g} s",
    }
    lease = _LEASE
    node: PostgresNode

    def create(self, queue: str) -> None:
        """Make a table and its index."""
        with connect(self.node.port) as connection:
            connection.execute(
                f"CREATE TABLE {queue} (id bigserial PRIMARY KEY, due bigint NOT NULL, "
                "until bigint NOT NULL DEFAULT 0, value bytea NOT NULL) "
                # Room for the row as it is while it is leased: no index has to be touched for it.
                "WITH (fillfactor = 45)"
            )
            connection.execute(f"CREATE INDEX ON {queue} (due, id)")

    def delete(self, queue: str) -> None:
        """Drop the table."""
        with connect(self.node.port) as connection:
            connection.execute(f"DROP TABLE {queue}")

    def enqueue(self, queue: str, batches: Iterable[list[bytes]]) -> float:
        """A COPY for each batch."""
        return self._enqueue(queue, ((values, [0] * len(values)) for values in batches))

    def schedule(self, queue: str, batches: Iterable[Dated]) -> None:
        """The same, with due times."""
        self._enqueue(queue, batches)

    def _enqueue(self, queue: str, batches: Iterable[Dated]) -> float:
        with connect(self.node.port) as connection, connection.cursor() as cursor:
            begin = time.perf_counter()
            for values, dues in batches:
                with cursor.copy(f"COPY {queue} (due, value) FROM STDIN (FORMAT binary)") as copy:
                    copy.set_types(["int8", "bytea"])
                    for row in zip(dues, values, strict=True):
                        copy.write_row(row)
            return time.perf_counter() - begin

    def lease_batches(self, queue: str, count: int, take: Take) -> float:
        """Lease, ack, and again."""
        lease, ack = self._statements(queue, BATCH)
        with connect(self.node.port) as connection, connection.cursor(binary=True) as cursor:
            begin = time.perf_counter()
            seen = 0
            while seen < count:
                with self._lasting(connection):
                    rows = sorted(cursor.execute(lease, prepare=True).fetchall())
                    if not rows:
                        break
                    take([value for _, value in rows])
                    done = cursor.execute(ack, ([number for number, _ in rows],), prepare=True)
                check(done.rowcount == len(rows), "not all were acked")
                seen += len(rows)
            return time.perf_counter() - begin

    def _lasting(self, connection: Any) -> contextlib.AbstractContextManager[object]:
        """What a lease needs as long as it lasts."""
        del connection
        return contextlib.nullcontext()

    def _statements(self, queue: str, count: int) -> tuple[str, str]:
        return self.lease.format(queue=queue, now=_NOW, count=count), _ACK.format(queue=queue)

    def lease_singles(self, queue: str, count: int, consumers: int) -> Worked:  # noqa: ARG002
        """A task and a connection for each consumer."""
        return run_async(self._lease_singles(queue, consumers))

    async def _lease_singles(self, queue: str, consumers: int) -> Worked:
        import psycopg

        address = self.node.address
        opened = [await psycopg.AsyncConnection.connect(address, autocommit=True) for _ in range(consumers)]
        lease, ack = self._statements(queue, 1)
        seen: list[bytes] = []

        async def consume(connection: Any) -> None:
            cursor = connection.cursor(binary=True)
            while True:
                async with self._async_lasting(connection):
                    await cursor.execute(lease, prepare=True)
                    row = await cursor.fetchone()
                    if row is None:
                        return
                    seen.append(row[1])
                    await cursor.execute(ack, ([row[0]],), prepare=True)

        begin = time.perf_counter()
        await asyncio.gather(*map(consume, opened))
        seconds = time.perf_counter() - begin
        for connection in opened:
            await connection.close()
        return Worked(seconds, seen)

    def _async_lasting(self, connection: Any) -> contextlib.AbstractAsyncContextManager[object]:
        del connection
        return contextlib.nullcontext()

    def left(self, queue: str) -> int:
        """All rows."""
        with connect(self.node.port) as connection:
            count: int = connection.execute(f"SELECT count(*) FROM {queue}").fetchone()[0]
            return count

    def receive(self) -> Receive:
        """Lease what is due, ack it, and again."""
        return functools.partial(_receive, self.node.port)


class PostgresTransaction(Postgres):
    """The lease is a transaction: less to write, and it lasts as long as the connection."""

    name = "postgres_transaction"
    words: ClassVar[str] = (
        "synced: fsync=on, synchronous_commit=on: enqueued, acked; a lease is a lock of its transaction and is lost "
        "with the connection"
    )
    api: ClassVar[Mapping[str, str]] = {
        "batches": f"BEGIN; SELECT ... LIMIT {BATCH} FOR UPDATE SKIP LOCKED; DELETE ... = ANY; COMMIT",
        "singles": "the same for one message, AsyncConnection, a connection a consumer, all in one process (uvloop)",
    }
    lease = _HOLD

    def _lasting(self, connection: Any) -> contextlib.AbstractContextManager[object]:
        found: contextlib.AbstractContextManager[object] = connection.transaction()
        return found

    def _async_lasting(self, connection: Any) -> contextlib.AbstractAsyncContextManager[object]:
        found: contextlib.AbstractAsyncContextManager[object] = connection.transaction()
        return found


def _receive(port: int, queue: str, count: int, ready: Callable[[], None]) -> Arrived:
    times: list[int] = []
    values: list[bytes] = []
    lease, ack = _LEASE.format(queue=queue, now=_NOW, count=BATCH), _ACK.format(queue=queue)
    with connect(port) as connection, connection.cursor(binary=True) as cursor:
        ready()
        while len(values) < count:
            rows = cursor.execute(lease, prepare=True).fetchall()
            now = time.time_ns()
            if not rows:
                time.sleep(_POLL_S)
                continue
            times += [now] * len(rows)
            values += [value for _, value in rows]
            cursor.execute(ack, ([number for number, _ in rows],), prepare=True)
    return Arrived(times, values)
