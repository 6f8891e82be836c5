"""Redis as a work queue: sorted sets for what waits and what is leased, a hash for the values, Lua to move them."""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from benchmarks.broker_redis import RedisNode
from headrace.bench.event_loop import run_async
from headrace.bench.queues import BATCH, Dated, Take, Worked, WorkQueue
from headrace.bench.receiver import Arrived, Receive
from headrace.bench.servers import HOST

_UNDER_WAY = 4
"""Batches that are sent before the first is answered."""
_LEASE_S = 30
_POLL_S = 0.01
"""How long a consumer sleeps at most: something may be enqueued that is due before all else."""

# KEYS: waiting (by due time in microseconds), leased (by the end of the lease), values by number, the last number.
_ENQUEUE = """
local last = redis.call('INCRBY', KEYS[4], #ARGV / 2)
local waiting, values = {}, {}
for i = 1, #ARGV, 2 do
  local id = string.format('%016d', last - #ARGV / 2 + (i + 1) / 2)
  waiting[i], waiting[i + 1], values[i], values[i + 1] = ARGV[i], id, id, ARGV[i + 1]
end
redis.call('ZADD', KEYS[1], unpack(waiting))
redis.call('HSET', KEYS[3], unpack(values))
return #ARGV / 2
"""
_LEASE = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[1])
if #ids == 0 then
  local next = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
  return {{}, {}, next and string.format('%.0f', next - now) or false}
end
local leased, till = {}, string.format('%.0f', now + ARGV[2] * 1000000)
for i, id in ipairs(ids) do leased[2 * i - 1], leased[2 * i] = till, id end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, #ids - 1)
redis.call('ZADD', KEYS[2], unpack(leased))
return {ids, redis.call('HMGET', KEYS[3], unpack(ids)), false}
"""
_ACK = """
local acked = redis.call('ZREM', KEYS[2], unpack(ARGV))
redis.call('HDEL', KEYS[3], unpack(ARGV))
return acked
"""


_Leased = tuple[list[bytes], list[bytes], bytes | None]
"""Numbers and values of messages; and if there are none, in how many microseconds the next is due."""


class RedisQueue(WorkQueue):
    """What a team builds that has Redis; a lease that ends would be put back by a script of its own."""

    name = "redis"
    words: ClassVar[str] = "synced: AOF, appendfsync always (before the answer): enqueued, leased, acked; no snapshots"
    api: ClassVar[Mapping[str, str]] = {
        "enqueue": f"a Lua script that adds a batch to a sorted set and a hash, {_UNDER_WAY} under way on a connection",
        "batches": f"a Lua script that leases {BATCH}, another that acks them (EVALSHA over redis-py's Connection)",
        "singles": "the same scripts for one message, redis.asyncio, a connection a consumer, one process (uvloop)",
        "timeline": f"due times in the sorted set; the script tells when the next is due; polls {_POLL_S:g} s at most",
    }
    node: RedisNode

    def create(self, queue: str) -> None:
        """Nothing: the first message makes it."""

    def delete(self, queue: str) -> None:
        """Drop all its keys."""
        with _client(self.node.port) as client:
            client.unlink(*_keys(queue))

    def enqueue(self, queue: str, batches: Iterable[list[bytes]]) -> float:
        """A script for each batch."""
        return self._enqueue(queue, ((values, [0] * len(values)) for values in batches))

    def schedule(self, queue: str, batches: Iterable[Dated]) -> None:
        """The same, with due times."""
        self._enqueue(queue, batches)

    def _enqueue(self, queue: str, batches: Iterable[Dated]) -> float:
        keys = _keys(queue)
        with _client(self.node.port) as client:
            script = client.script_load(_ENQUEUE)
            connection = client.connection_pool.get_connection()
            begin = time.perf_counter()
            under_way = 0
            for values, dues in batches:
                pairs = [part for pair in zip(dues, values, strict=True) for part in pair]
                connection.send_packed_command(connection.pack_command("EVALSHA", script, len(keys), *keys, *pairs))
                under_way += 1
                if under_way == _UNDER_WAY:
                    connection.read_response()
                    under_way -= 1
            for _ in range(under_way):
                connection.read_response()
            seconds = time.perf_counter() - begin
            client.connection_pool.release(connection)
        return seconds

    def lease_batches(self, queue: str, count: int, take: Take) -> float:
        """Lease, ack, and again."""
        with _Consumer(self.node.port, queue) as consumer:
            begin = time.perf_counter()
            seen = 0
            while seen < count:
                ids, values, _ = consumer.lease()
                if not ids:
                    break
                take(values)
                consumer.ack(ids)
                seen += len(ids)
            return time.perf_counter() - begin

    def lease_singles(self, queue: str, count: int, consumers: int) -> Worked:  # noqa: ARG002
        """A task and a connection for each consumer."""
        return run_async(_lease_singles(self.node.port, queue, consumers))

    def left(self, queue: str) -> int:
        """Those whose values are there."""
        _, leased, values, _ = _keys(queue)
        with _client(self.node.port) as client:
            return int(max(client.hlen(values), client.zcard(leased)))

    def receive(self) -> Receive:
        """Lease what is due, ack it, sleep until the next is due."""
        return functools.partial(_receive, self.node.port)


class RedisOverlapped(RedisQueue):
    """The next messages are leased while those before are acknowledged."""

    name = "redis_overlapped"
    api: ClassVar[Mapping[str, str]] = {
        "batches": f"the Lua script that acks and the one that leases the next {BATCH}, sent together"
    }

    def lease_batches(self, queue: str, count: int, take: Take) -> float:  # noqa: ARG002
        """Ack and lease, and again."""
        with _Consumer(self.node.port, queue) as consumer:
            begin = time.perf_counter()
            ids, values, _ = consumer.lease()
            while ids:
                take(values)
                consumer.send_ack(ids)
                consumer.send_lease()  # the last time there is nothing left
                consumer.acked(len(ids))
                ids, values, _ = consumer.leased()
            return time.perf_counter() - begin


def _keys(queue: str) -> tuple[str, ...]:
    return f"{queue}:waiting", f"{queue}:leased", f"{queue}:values", f"{queue}:last"


def _client(port: int) -> Any:
    import redis

    # The older protocol is quicker here, and its answers are lists.
    return redis.Redis(HOST, port, protocol=2)


class _Consumer:
    """One connection that leases and acks by the scripts."""

    def __init__(self, port: int, queue: str) -> None:
        self._client = _client(port)
        self._lease = self._client.script_load(_LEASE)
        self._ack = self._client.script_load(_ACK)
        self._connection = self._client.connection_pool.get_connection()
        self._keys = _keys(queue)

    def __enter__(self) -> "_Consumer":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.connection_pool.release(self._connection)
        self._client.close()

    def lease(self) -> _Leased:
        self.send_lease()
        return self.leased()

    def ack(self, ids: Sequence[bytes]) -> None:
        self.send_ack(ids)
        self.acked(len(ids))

    def send_lease(self) -> None:
        self._connection.send_command("EVALSHA", self._lease, len(self._keys), *self._keys, BATCH, _LEASE_S)

    def leased(self) -> _Leased:
        ids, values, wait_us = self._connection.read_response()
        return ids, values, wait_us

    def send_ack(self, ids: Sequence[bytes]) -> None:
        self._connection.send_command("EVALSHA", self._ack, len(self._keys), *self._keys, *ids)

    def acked(self, count: int) -> None:
        acked = self._connection.read_response()
        if acked != count:
            raise RuntimeError(f"{acked} of {count} were acked")


async def _lease_singles(port: int, queue: str, consumers: int) -> Worked:
    from redis import asyncio as redis

    clients = [redis.Redis(host=HOST, port=port, protocol=2, single_connection_client=True) for _ in range(consumers)]
    lease_script, ack_script = await clients[0].script_load(_LEASE), await clients[0].script_load(_ACK)
    keys = _keys(queue)
    seen: list[bytes] = []

    async def consume(client: Any) -> None:
        while True:
            ids, values, _ = await client.execute_command("EVALSHA", lease_script, len(keys), *keys, 1, _LEASE_S)
            if not ids:
                return
            seen.append(values[0])
            await client.execute_command("EVALSHA", ack_script, len(keys), *keys, *ids)

    await asyncio.gather(*(client.ping() for client in clients))
    begin = time.perf_counter()
    await asyncio.gather(*map(consume, clients))
    seconds = time.perf_counter() - begin
    await asyncio.gather(*(client.aclose() for client in clients))
    return Worked(seconds, seen)


def _receive(port: int, queue: str, count: int, ready: Callable[[], None]) -> Arrived:
    times: list[int] = []
    values: list[bytes] = []
    with _Consumer(port, queue) as consumer:
        ready()
        while len(values) < count:
            ids, found, wait_us = consumer.lease()
            now = time.time_ns()
            if not ids:
                time.sleep(min(int(wait_us) / 1e6, _POLL_S) if wait_us else _POLL_S)
                continue
            times += [now] * len(found)
            values += found
            consumer.ack(ids)
    return Arrived(times, values)
