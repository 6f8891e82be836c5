"""Request/reply over Redis, with redis-py: a list of requests, and a list for each caller's replies."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.broker_redis import RedisNode
from headrace.bench.brokers import PublishPace
from headrace.bench.request_workloads import RequestContestant, Respond
from headrace.bench.servers import HOST

_PATIENCE_S = 30


class RedisRequests(RequestContestant):
    """What users of Redis do: the name of the list for the reply goes before the value."""

    name = "redis"
    api = "redis.asyncio: RPUSH of request and BLPOP of reply here, BLPOP and RPUSH in another process (uvloop)"
    words = "written: AOF, appendfsync everysec, until it is popped"
    node: RedisNode

    def __init__(self) -> None:
        super().__init__(RedisNode())

    def respond(self) -> Respond:
        """Pops requests, and pushes replies."""
        return functools.partial(_respond, self.node.port)

    async def ask(self, subject: str, values: Sequence[bytes], pace: PublishPace) -> tuple[list[float], list[bytes]]:
        """A push and a pop for each."""
        latencies: list[float] = []
        replies: list[bytes] = []
        client, inbox = _client(self.node.port), f"{subject}.inbox".encode()
        await client.ping()
        for value in values:
            await pace.turn()
            begin = time.perf_counter()
            await client.rpush(subject, inbox + b"\n" + value)
            _, reply = await client.blpop(inbox, timeout=_PATIENCE_S)
            latencies.append(time.perf_counter() - begin)
            replies.append(reply)
        await client.aclose()
        return latencies, replies


def _client(port: int) -> Any:
    from redis import asyncio as redis

    return redis.Redis(host=HOST, port=port, protocol=2, single_connection_client=True)


async def _respond(port: int, subject: str, ready: Callable[[], None]) -> None:
    client = _client(port)
    await client.ping()
    ready()
    while True:
        popped = await client.blpop(subject, timeout=_PATIENCE_S)
        if popped is not None:
            inbox, _, value = popped[1].partition(b"\n")
            await client.rpush(inbox, value)
