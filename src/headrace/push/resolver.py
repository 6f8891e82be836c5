"""Looks up the addresses of names without holding the event loop."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import TypeVar, cast

from headrace.push.address_guard import Address

_T = TypeVar("_T")
Resolve = Callable[[str, int], Awaitable[list[Address]]]
"""The addresses of a host, for a port; an OSError if it has none."""

_THREADS_MAX = 8
"""The most look-ups at once. One that hangs keeps its thread until the system's resolver gives up."""


class Resolver:
    """The system's resolver, in a bounded number of threads that nobody waits for when the process ends."""

    def __init__(self, threads_max: int = _THREADS_MAX) -> None:
        self._free = asyncio.Semaphore(threads_max)

    async def resolve(self, host: str, port: int) -> list[Address]:
        """All addresses of a name, in the order in which the system prefers them."""
        found = await self.run(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        return list(dict.fromkeys(ip_address(address[0]) for *_, address in found))

    async def run(self, call: Callable[[], _T]) -> _T:
        """Run a blocking function in a thread; returns what it returns. Cancelling the wait does not end the thread."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def finish(result: _T | None, error: Exception | None) -> None:
            self._free.release()
            if future.done():  # the wait was cancelled
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(cast(_T, result))

        def work() -> None:
            result, failure = None, None
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 whoever waits is told
                failure = error
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(finish, result, failure)

        try:
            threading.Thread(target=work, name="headrace-resolver", daemon=True).start()
        except RuntimeError as error:  # the process may have no more threads
            finish(None, OSError(str(error)))
        return await future
