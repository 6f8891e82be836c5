"""The HTTP client with which the broker sends requests to the URLs of its users."""

import asyncio
import os
import ssl
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace.model.errors import DeliveryFailed, InvalidArgument
from headrace.model.receiver_url import ReceiverUrl, parse_receiver_url
from headrace.push.address_guard import AddressGuard
from headrace.push.resolver import Resolve, Resolver

if TYPE_CHECKING:
    import httpcore2

RESPONSE_BYTES_MAX = 64 << 10
"""Of the head and of the body of an answer, each. The rest of a longer body is not read."""
CONNECTIONS_MAX = 64
CONNECTIONS_PER_HOST_MAX = 8
CONNECT_TIMEOUT_S = 10.0
"""For the look-up of the name and the connection, and for the handshake of TLS."""

_STOPS = "the broker stops"
_OWN_HEADERS = frozenset(
    ("host", "content-length", "transfer-encoding", "connection", "keep-alive", "te", "trailer", "upgrade", "expect")
)
"""Headers that say how a request is framed, which only the client can know."""


@dataclass(frozen=True)
class OutgoingResponse:
    """The answer of a receiver."""

    status: int
    headers: dict[str, str]
    """By name in lower case; values of a repeated name are joined by commas."""
    body: bytes
    """As it was sent: nothing is decompressed."""
    is_truncated: bool
    """Whether the body was longer than what was read of it."""


class OutgoingClient:
    """Sends requests to receivers on the event loop that runs; each ends in time, whatever the receiver does.

    Redirects are answers like others, and not followed. There are no cookies and no proxies. Each request has a
    connection of its own: on one that is used again, what a receiver sent too much would answer the next request.
    """

    def __init__(
        self,
        guard: AddressGuard,
        *,
        user_agent: str = "headrace",
        trust: ssl.SSLContext | None = None,
        resolve: Resolve | None = None,
        connections_max: int = CONNECTIONS_MAX,
        connections_per_host_max: int = CONNECTIONS_PER_HOST_MAX,
    ) -> None:
        """Prepare a client that connects to what the guard allows. `trust` has the certificate authorities, by default
        those of the system; `resolve` looks names up, by default the system's resolver.
        """
        self.guard = guard
        self._user_agent = user_agent
        self._trust = trust
        self._resolver = Resolver()
        self._resolve = resolve or self._resolver.resolve
        self._connections_max = connections_max
        self._per_host_max = connections_per_host_max
        self._pool: httpcore2.AsyncConnectionPool | None = None
        self._opening = asyncio.Lock()
        self._hosts: dict[tuple[str, int], _HostSlots] = {}
        self._running: set[asyncio.Timeout] = set()
        """The time-outs of all requests that wait for an answer."""
        self._ended_early: frozenset[asyncio.Timeout] = frozenset()
        self._all_ended = asyncio.Event()
        self._closed = False

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        timeout_s: float = 30.0,
    ) -> OutgoingResponse:
        """Send a request, and wait for its answer, which may take `timeout_s` in all.

        Raises `AddressRefused` if the URL leads where the broker does not connect to, `DeliveryFailed` if there is no
        answer, and `InvalidArgument` if the URL or a header cannot be sent.
        """
        if self._closed:
            raise DeliveryFailed(_STOPS)
        target = parse_receiver_url(url)
        self.guard.check_url(target)
        head = self._head(target, headers or {}, method, body)
        slots = self._hosts.setdefault((target.host, target.port), _HostSlots(self._per_host_max))
        limit = asyncio.timeout(timeout_s)
        self._began(slots, limit)
        try:
            async with limit, slots.free:
                return await self._exchange(method, target, head, body, timeout_s)
        except TimeoutError as error:
            if limit in self._ended_early:
                raise DeliveryFailed(_STOPS) from error
            raise DeliveryFailed(f"{target.authority} did not answer within {timeout_s:g} s") from error
        finally:
            self._ended(slots, limit)
            if not slots.users:
                del self._hosts[target.host, target.port]

    async def close(self) -> None:
        """End all requests, which fail, and close all connections."""
        self._closed = True
        if self._running:
            now_s = asyncio.get_running_loop().time()
            self._ended_early = frozenset(self._running)
            for limit in self._ended_early:
                limit.reschedule(now_s)
            await self._all_ended.wait()
        if self._pool is not None:
            await self._pool.aclose()

    def _began(self, slots: "_HostSlots", limit: asyncio.Timeout) -> None:
        slots.users += 1
        self._running.add(limit)
        self._all_ended.clear()

    def _ended(self, slots: "_HostSlots", limit: asyncio.Timeout) -> None:
        slots.users -= 1
        self._running.discard(limit)
        if not self._running:
            self._all_ended.set()

    def _head(
        self, url: ReceiverUrl, headers: Mapping[str, str], method: str, body: bytes
    ) -> list[tuple[bytes, bytes]]:
        head = {"Host": url.authority, "User-Agent": self._user_agent, "Accept-Encoding": "identity", "Accept": "*/*"}
        head["Connection"] = "close"
        if body or method not in ("GET", "HEAD"):
            head["Content-Length"] = str(len(body))
        replaced = {name.lower() for name in headers}
        pairs = [(name, value) for name, value in head.items() if name.lower() not in replaced - _OWN_HEADERS]
        for name, value in headers.items():
            if name.lower() in _OWN_HEADERS:
                raise InvalidArgument(f"the header {name} is the client's own; leave it out")
            pairs.append((name, value))
        try:
            return [(name.encode("ascii"), value.encode("latin-1")) for name, value in pairs]
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"a header has a character that HTTP cannot send: {error.object!r}") from error

    async def _exchange(
        self, method: str, url: ReceiverUrl, head: list[tuple[bytes, bytes]], body: bytes, timeout_s: float
    ) -> OutgoingResponse:
        pool = self._pool or await self._open()
        import httpcore2

        request = httpcore2.Request(
            method,
            httpcore2.URL(
                scheme=url.scheme.encode(), host=url.host.encode(), port=url.port, target=url.target.encode("ascii")
            ),
            headers=head,
            content=body,
            extensions={"timeout": {"connect": min(CONNECT_TIMEOUT_S, timeout_s)}},  # `send` bounds the whole
        )
        try:
            response = await pool.handle_async_request(request)
            try:
                return await _read(response, url)
            finally:
                await response.aclose()
        except httpcore2.LocalProtocolError as error:
            raise InvalidArgument(f"the request cannot be sent: {error}") from error
        except httpcore2.ConnectTimeout as error:
            limit_s = min(CONNECT_TIMEOUT_S, timeout_s)
            raise DeliveryFailed(f"cannot connect to {url.authority}: no connection within {limit_s:g} s") from error
        except httpcore2.ConnectError as error:
            raise DeliveryFailed(f"cannot connect to {url.authority}: {_reason(error)}") from error
        except httpcore2.RemoteProtocolError as error:
            # The library quotes what it received, as Python writes it.
            reason = _reason(error).partition(" bytearray(")[0].rstrip(":")
            raise DeliveryFailed(f"{url.authority} sent no answer of HTTP: {reason}") from error
        except (httpcore2.NetworkError, httpcore2.TimeoutException, OSError) as error:
            raise DeliveryFailed(f"the connection to {url.authority} broke: {_reason(error)}") from error

    async def _open(self) -> "httpcore2.AsyncConnectionPool":
        """Load the library and the certificate authorities in a thread: both take longer than the loop can wait."""
        async with self._opening:
            if self._pool is None:
                self._pool = await self._resolver.run(partial(_load_pool, self))
        return self._pool


class _HostSlots:
    """How many requests may go to a host at once, and how many want to."""

    def __init__(self, at_once: int) -> None:
        self.free = asyncio.Semaphore(at_once)
        self.users = 0


def _load_pool(client: OutgoingClient) -> "httpcore2.AsyncConnectionPool":
    from headrace.push.guarded_network import new_pool

    return new_pool(client.guard, client._resolve, client._trust, client._connections_max)


async def _read(response: "httpcore2.Response", url: ReceiverUrl) -> OutgoingResponse:
    """The head and the body of an answer, as far as they may be long."""
    size = sum(len(name) + len(value) for name, value in response.headers)
    if size > RESPONSE_BYTES_MAX:
        raise DeliveryFailed(f"the answer of {url.authority} has a head of {size} bytes")
    headers: dict[str, str] = {}
    for raw_name, raw_value in response.headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    body = bytearray()
    is_truncated = False
    async with aclosing(response.aiter_stream()) as chunks:
        async for chunk in chunks:
            body += chunk[: RESPONSE_BYTES_MAX + 1 - len(body)]
            if len(body) > RESPONSE_BYTES_MAX:
                is_truncated = True
                break
    return OutgoingResponse(response.status, headers, bytes(body[:RESPONSE_BYTES_MAX]), is_truncated)


def _reason(error: BaseException) -> str:
    """What happened, from the error of the system if there is one."""
    text = ""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is refused: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed: {cause.reason}"
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
        text = text or str(cause)
        cause = cause.__cause__ or cause.__context__
    return text or "it was closed"
