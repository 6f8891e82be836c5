"""Redis Streams, with redis-py and hiredis: as it is documented, and as fast as it can be made."""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from benchmarks import installing
from headrace.bench.brokers import Contestant, PublishPace, Take
from headrace.bench.event_loop import run_async
from headrace.bench.receiver import Arrived, Receive
from headrace.bench.servers import HOST, ServerNode, answers, free_port
from headrace.security.development_ca import DevelopmentCa

_FIELD = b"v"
_COUNT = 1000
"""Entries that a read asks for."""
_UNDER_WAY = 4
"""Scripts that are sent before the first is answered."""
_SCRIPT = "for i = 1, #ARGV do redis.call('XADD', KEYS[1], '*', 'v', ARGV[i]) end return #ARGV"


class RedisNode(ServerNode):
    """One redis-server, with its append-only file."""

    port = 0

    def __init__(self, *, tls: bool = False) -> None:
        super().__init__()
        self._tls = tls
        self.ca = ""
        """The CA of its certificate, if it speaks TLS."""

    def find(self) -> None:
        """Make sure of the server and the client."""
        installing.debian_program("redis-server", "redis-server")
        installing.need("redis", "redis")
        installing.need("hiredis", "hiredis")

    def _start(self, place: str, *, synced: bool) -> None:
        self.port = free_port()
        settings: dict[str, object] = {
            "port": self.port,
            "bind": HOST,
            "dir": place,
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always" if synced else "everysec",
            # Rewriting the file in the middle of a sample would measure something else.
            "auto-aof-rewrite-percentage": 0,
        }
        if self._tls:
            files = DevelopmentCa(place).make_server()
            self.ca = files.ca
            settings |= {"port": 0, "tls-port": self.port, "tls-cert-file": files.certificate}
            settings |= {"tls-key-file": files.key, "tls-ca-cert-file": files.ca, "tls-auth-clients": "no"}
        command = [installing.debian_program("redis-server", "redis-server")]
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        self._launch(command, place, self._answers)

    def _answers(self) -> bool:
        if not self._tls:
            return answers(self.port, b"PING\r\n", b"+PONG")
        return answers(self.port, b"", b"") and bool(_client(self.port, self.ca).ping())


class Redis(Contestant):
    """What redis-py's own calls give."""

    name = "redis"
    words: ClassVar[Mapping[bool, str]] = {
        False: "written: AOF, appendfsync everysec (Redis 7's default for AOF); no snapshots",
        True: "synced: AOF, appendfsync always (before the answer); no snapshots",
    }
    api: ClassVar[Mapping[str, str]] = {
        "publish": "Redis.pipeline(transaction=False) of XADDs, a batch each",
        "consume": f"Redis.xread(count={_COUNT})",
        "latency": "XADD over redis-py's Connection here, Redis.xread(block=...) in another process",
        "single": "redis.asyncio, XADD awaited, one connection a client, all in one process (uvloop)",
    }
    node: RedisNode

    def _client(self) -> Any:
        return _client(self.node.port, self.node.ca)

    def create(self, topic: str) -> None:
        """Nothing: the first entry makes the stream."""

    def delete(self, topic: str) -> None:
        """Drop a stream."""
        with self._client() as client:
            client.delete(topic)

    def publish(self, topic: str, batches: Iterable[list[bytes]]) -> float:
        """A pipeline for each batch."""
        with self._client() as client:
            client.ping()
            begin = time.perf_counter()
            for values in batches:
                pipeline = client.pipeline(transaction=False)
                for value in values:
                    pipeline.execute_command("XADD", topic, b"*", _FIELD, value)
                pipeline.execute()
            return time.perf_counter() - begin

    def consume(self, topic: str, count: int, take: Take) -> float:
        """Read after read."""
        with self._client() as client:
            client.ping()
            begin = time.perf_counter()
            last, seen = b"0", 0
            while seen < count and (answer := client.xread({topic: last}, count=_COUNT)):
                entries = answer[0][1]
                take([fields[_FIELD] for _, fields in entries])
                last = entries[-1][0]
                seen += len(entries)
            return time.perf_counter() - begin

    def publish_paced(self, topic: str, values: Iterable[bytes], pace: PublishPace) -> list[int]:
        """Answers are read when they are there."""
        begun = []
        with self._client() as client:
            client.ping()
            connection = client.connection_pool.get_connection()
            unanswered = 0
            for value in values:
                begun.append(pace.wait())
                connection.send_command("XADD", topic, b"*", _FIELD, value)
                unanswered += 1
                while unanswered and connection.can_read(0):
                    connection.read_response()
                    unanswered -= 1
            for _ in range(unanswered):
                connection.read_response()
            client.connection_pool.release(connection)
        return begun

    def receive(self) -> Receive:
        """Blocking reads."""
        return functools.partial(_receive, self.node.port)

    def publish_single(self, topic: str, shares: Sequence[Sequence[bytes]]) -> float:
        """A task and a connection for each share."""
        return run_async(_publish_single(self.node.port, topic, shares))


class RedisTuned(Redis):
    """What can be had below redis-py's own calls."""

    name = "redis_tuned"
    api: ClassVar[Mapping[str, str]] = {
        "publish": f"a Lua script that adds a whole batch, EVALSHA, {_UNDER_WAY} under way on one connection",
        "consume": f"XREAD COUNT {_COUNT} over redis-py's Connection, the values from the answer as hiredis gives it",
    }

    def publish(self, topic: str, batches: Iterable[list[bytes]]) -> float:
        """A script for each batch."""
        with self._client() as client:
            script = client.script_load(_SCRIPT)
            connection = client.connection_pool.get_connection()
            begin = time.perf_counter()
            under_way = 0
            for values in batches:
                connection.send_packed_command(connection.pack_command("EVALSHA", script, 1, topic, *values))
                under_way += 1
                if under_way == _UNDER_WAY:
                    connection.read_response()
                    under_way -= 1
            for _ in range(under_way):
                connection.read_response()
            seconds = time.perf_counter() - begin
            client.connection_pool.release(connection)
        return seconds

    def consume(self, topic: str, count: int, take: Take) -> float:
        """Read after read, the answer as it comes."""
        with self._client() as client:
            client.ping()
            connection = client.connection_pool.get_connection()
            begin = time.perf_counter()
            last, seen = b"0", 0
            while seen < count:
                connection.send_command("XREAD", "COUNT", _COUNT, "STREAMS", topic, last)
                answer = connection.read_response()
                if not answer:
                    break
                entries = answer[0][1]
                take([fields[1] for _, fields in entries])
                last = entries[-1][0]
                seen += len(entries)
            seconds = time.perf_counter() - begin
            client.connection_pool.release(connection)
        return seconds


def _client(port: int, ca: str = "") -> Any:
    import redis

    tls = {"ssl": True, "ssl_ca_certs": ca} if ca else {}
    # The older protocol is quicker here, and its answers are lists.
    return redis.Redis(HOST, port, protocol=2, **tls)


def _receive(port: int, topic: str, count: int, ready: Callable[[], None]) -> Arrived:
    times: list[int] = []
    values: list[bytes] = []
    with _client(port) as client:
        client.ping()
        ready()
        last = b"0"
        while len(values) < count:
            for _, entries in client.xread({topic: last}, count=_COUNT, block=10_000):
                now = time.monotonic_ns()
                for entry, fields in entries:
                    times.append(now)
                    values.append(fields[_FIELD])
                    last = entry
    return Arrived(times, values)


async def _publish_single(port: int, topic: str, shares: Sequence[Sequence[bytes]]) -> float:
    from redis import asyncio as redis

    clients = [redis.Redis(host=HOST, port=port, protocol=2, single_connection_client=True) for _ in shares]

    async def publish(client: Any, values: Sequence[bytes]) -> None:
        for value in values:
            await client.execute_command("XADD", topic, b"*", _FIELD, value)

    await asyncio.gather(*(client.ping() for client in clients))
    begin = time.perf_counter()
    await asyncio.gather(*map(publish, clients, shares))
    seconds = time.perf_counter() - begin
    await asyncio.gather(*(client.aclose() for client in clients))
    return seconds
