"""Handshakes of TLS that tell both sides why they fail.

The event loop's own TLS closes the connection of a failed handshake without sending the alert that OpenSSL has made, so
that a client could not tell a missing certificate from a broken network.
"""

import asyncio
import contextvars
import ssl
from typing import Any


class HandshakeCounts:
    """How many handshakes there were, of all listeners of a server."""

    def __init__(self) -> None:
        self.completed = 0
        self.failed = 0
        """With those that were dropped, timed out, or spoke no TLS."""


class HandshakeAttempt:
    """One handshake, from the moment that a client's first bytes are there."""

    def __init__(self) -> None:
        self.failure: asyncio.Future[ssl.SSLError] = asyncio.get_running_loop().create_future()
        """Why it has failed; the alert is on its way then."""

    def begin(self) -> None:
        """Make this the attempt that contexts of the current task report to."""
        _current.set(self)

    def fail(self, error: ssl.SSLError) -> None:
        """Report a failure."""
        if not self.failure.done():
            self.failure.set_result(error)


_current: contextvars.ContextVar[HandshakeAttempt | None] = contextvars.ContextVar("handshake", default=None)


class _HandshakeObject(ssl.SSLObject):
    """Lets the transport send the alert of a failed handshake, instead of closing the connection before that."""

    attempt: HandshakeAttempt | None = None
    _has_failed = False

    def do_handshake(self) -> None:
        """Go on with the handshake; after a failure it only waits for the client to close the connection."""
        if not self._has_failed:
            try:
                return super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                if self.attempt is None:
                    raise
                self._has_failed = True
                self.attempt.fail(error)
        raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "the handshake has failed")


class HandshakeContext(ssl.SSLContext):
    """A server's context whose handshakes report to the attempt of the task that began them."""

    sslobject_class = _HandshakeObject

    def wrap_bio(self, *given: Any, **named: Any) -> ssl.SSLObject:
        """Make the object of a connection."""
        made = super().wrap_bio(*given, **named)
        made.attempt = _current.get()  # type: ignore[attr-defined]  # of the class above
        return made
