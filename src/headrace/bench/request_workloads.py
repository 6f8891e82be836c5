"""Benchmarks of request/reply: one process asks and another answers, through a broker."""

import abc
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from headrace.bench import processes
from headrace.bench.broker_workloads import HeadraceNode
from headrace.bench.brokers import RATE, WARM_UP, PublishPace
from headrace.bench.event_loop import run_async
from headrace.bench.measure import Sample, Subject, WrongResult, check
from headrace.bench.payload import Payload
from headrace.bench.servers import ServerNode
from headrace.client._async.app.app import AsyncApp
from headrace.client._async.connecting import connect_async

_PATIENCE_S = 30.0

Respond = Callable[[str, Callable[[], None]], Coroutine[Any, Any, None]]
"""Answers each request with its own value, for ever; calls back once it will get all requests from then on."""


class RequestContestant(abc.ABC):
    """A broker through which one process asks another, and a Python client of it."""

    name: str
    api: ClassVar[str]
    """What is called."""
    words: ClassVar[str]
    """What is kept of a request."""

    def __init__(self, node: ServerNode) -> None:
        self.node = node

    @abc.abstractmethod
    def respond(self) -> Respond:
        """What answers in another process."""

    @abc.abstractmethod
    async def ask(self, subject: str, values: Sequence[bytes], pace: PublishPace) -> tuple[list[float], list[bytes]]:
        """Ask one after the other; returns the seconds that each took, and the replies."""


def asking(contestant: RequestContestant, payload: Payload) -> Subject:
    """The time from the call of a request to its reply; one request at a time, at a steady rate."""
    numbers = itertools.count()

    def sample(_: str, count: int) -> Sample:
        subject = f"bench.{next(numbers)}"
        values = list(payload.values(count + WARM_UP))
        with _answering(contestant.respond(), subject):
            begin = time.perf_counter()
            latencies, replies = run_async(contestant.ask(subject, values, PublishPace()))
            seconds = time.perf_counter() - begin
        check(replies == values, "a reply is not the one to its request")
        return Sample(seconds, latencies[WARM_UP:])

    params = {
        "api": contestant.api,
        "durability": contestant.words,
        "requests_per_second": RATE,
        "warm_up": f"the first {WARM_UP} requests do not count",
    }
    start = functools.partial(contestant.node.start, synced=False)
    return Subject(contestant.name, sample, params, 1, start, contestant.node.stop)


@contextlib.contextmanager
def _answering(respond: Respond, subject: str) -> Iterator[None]:
    """Another process that answers requests meanwhile."""
    ready, theirs = processes.spawn.Pipe()
    process = processes.start(_respond, theirs, respond, subject)
    theirs.close()
    try:
        try:
            if not ready.poll(_PATIENCE_S):
                raise WrongResult(f"the process that answers said nothing for {_PATIENCE_S:g} s")
            ready.recv()
        except EOFError:
            raise WrongResult("the process that answers ended before it began") from None
        yield
    finally:
        process.kill()
        process.join()
        process.close()
        ready.close()


def _respond(ready: Connection, respond: Respond, subject: str) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        run_async(respond(subject, lambda: ready.send(None)))


class HeadraceRequests(RequestContestant):
    """The broker and its Python client."""

    name = "headrace"
    api = "AsyncBus.request here, AsyncApp.serves with a coroutine in another process (uvloop)"
    words = "none: a request is in memory until it is answered"
    node: HeadraceNode

    def __init__(self) -> None:
        super().__init__(HeadraceNode())

    def respond(self) -> Respond:
        """An app with one handler."""
        return functools.partial(_serve, self.node.address)

    async def ask(self, subject: str, values: Sequence[bytes], pace: PublishPace) -> tuple[list[float], list[bytes]]:
        """A call for each."""
        latencies: list[float] = []
        replies: list[bytes] = []
        async with await connect_async(self.node.address) as bus:
            await bus.info()
            for value in values:
                await pace.turn()
                begin = time.perf_counter()
                reply = await bus.request(subject, value, timeout=_PATIENCE_S)
                latencies.append(time.perf_counter() - begin)
                replies.append(reply.value)
        return latencies, replies


async def _serve(address: str, subject: str, ready: Callable[[], None]) -> None:
    import asyncio

    async with await connect_async(address) as bus:
        app = AsyncApp(bus)

        @app.serves(subject, concurrency=16)
        async def answer(request: Any) -> bytes:
            return bytes(request.value)

        running = asyncio.ensure_future(app.run(stop_on_signals=False))
        while not (await bus.subjects.info()).responders:
            await asyncio.sleep(0.01)
        ready()
        await running


def paced_params(payload: Payload) -> Mapping[str, Any]:
    """What is told of requests and messages one by one."""
    return {"size": payload.size, "batch": 1}
