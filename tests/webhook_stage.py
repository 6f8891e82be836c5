"""A broker that sends webhooks to receivers of the test's own process, and a receiver whose answers are scripted."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
from tests.receivers import Arrived, Receiver, Script, receiver

import headrace
from headrace.client._sync.bus import Bus

WAIT_S = 20.0

needs_outgoing = pytest.mark.skipif(
    find_spec("httpcore2") is None, reason="the extra http is not installed: there is no httpcore2"
)


class ThreadedReceiver:
    """A receiver on an event loop and thread of its own: what it has received, and how it answers next."""

    def __init__(self, script: Script | None = None) -> None:
        self.script: Script = script or self._answer
        self.statuses: list[int | str] = []
        """The next answers: a status, or a whole head; then 200."""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._served: Receiver | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    @property
    def url(self) -> str:
        assert self._served is not None
        return f"http://127.0.0.1:{self._served.port}/hook"

    @property
    def requests(self) -> list[Arrived]:
        """All requests so far."""
        assert self._served is not None
        return list(self._served.requests)

    def bodies(self) -> list[Any]:
        """The bodies of all requests so far, as JSON."""
        return [json.loads(one.body) for one in self.requests]

    def values(self) -> list[Any]:
        """The values of the envelopes, in the order in which they came."""
        return [one["value"] for body in self.bodies() for one in (body if isinstance(body, list) else [body])]

    def wait_for(self, count: int) -> list[Arrived]:
        """Wait for so many requests."""
        until(lambda: len(self.requests) >= count)
        return self.requests

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with receiver(lambda request, writer: self.script(request, writer)) as self._served:
            self._ready.set()
            await self._stop.wait()

    async def _answer(self, _: Arrived, writer: asyncio.StreamWriter) -> bool:
        status = self.statuses.pop(0) if self.statuses else 200
        head = status if isinstance(status, str) else f"{status} Status"
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        return True


def answers(head: str) -> Callable[[Arrived, asyncio.StreamWriter], Awaitable[bool]]:
    """A script that always answers with this status line and headers, without a body."""

    async def answer(_: Arrived, writer: asyncio.StreamWriter) -> bool:
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        return True

    return answer


def until(reached: Callable[[], Any], why: str = "it did not happen in time") -> Any:
    """Wait until something is so; returns it."""
    deadline_s = time.monotonic() + WAIT_S
    while not (found := reached()):
        assert time.monotonic() < deadline_s, why
        time.sleep(0.01)
    return found


@contextmanager
def sending_bus(data: str = ":memory:", **settings: Any) -> Iterator[Bus]:
    """A bus on a broker of its own, which may send to this machine."""
    with headrace.open(data, webhook_networks=["loopback"], **settings) as bus:
        yield bus


@contextmanager
def threaded_receiver(script: Script | None = None) -> Iterator[ThreadedReceiver]:
    """A receiver that listens while the block runs."""
    served = ThreadedReceiver(script)
    try:
        yield served
    finally:
        served.close()
