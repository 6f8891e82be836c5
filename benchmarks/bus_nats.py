"""Request/reply of NATS, with nats-py: an inbox subscription of the client, as its `request` makes it."""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.broker_nats import NatsNode
from headrace.bench.brokers import PublishPace
from headrace.bench.request_workloads import RequestContestant, Respond
from headrace.bench.servers import HOST

_PATIENCE_S = 30.0


class NatsRequests(RequestContestant):
    """What nats-py's own calls give."""

    name = "nats"
    api = "Client.request here, Client.subscribe with a callback that awaits Msg.respond in another process (uvloop)"
    words = "none: core NATS stores nothing"
    node: NatsNode

    def __init__(self) -> None:
        super().__init__(NatsNode())

    def respond(self) -> Respond:
        """A subscription with a callback."""
        return functools.partial(_respond, self.node.port)

    async def ask(self, subject: str, values: Sequence[bytes], pace: PublishPace) -> tuple[list[float], list[bytes]]:
        """A call for each."""
        latencies: list[float] = []
        replies: list[bytes] = []
        client = await _connect(self.node.port)
        for value in values:
            await pace.turn()
            begin = time.perf_counter()
            reply = await client.request(subject, value, timeout=_PATIENCE_S)
            latencies.append(time.perf_counter() - begin)
            replies.append(reply.data)
        await client.close()
        return latencies, replies


async def _connect(port: int) -> Any:
    import nats

    return await nats.connect(f"nats://{HOST}:{port}", allow_reconnect=False)


async def _respond(port: int, subject: str, ready: Callable[[], None]) -> None:
    client = await _connect(port)

    async def answer(message: Any) -> None:
        await message.respond(message.data)

    await client.subscribe(subject, cb=answer)
    await client.flush()
    ready()
    await asyncio.Event().wait()
