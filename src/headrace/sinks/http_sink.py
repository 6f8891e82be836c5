"""A sink that posts messages to a URL."""

import http.client
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

from headrace.model.arguments import shown
from headrace.model.errors import DeliveryRefused, InvalidArgument
from headrace.model.message import Message
from headrace.sinks.envelope import envelope_bytes

_TIMEOUT_S = 30.0
_RETRYABLE = (408, 425, 429)
_ANSWER_BYTES_MAX = 64 << 10


class HttpSink:
    """`http://…` and `https://…`: one POST per message, delivered when the answer is 2xx.

    The body is the message's envelope in JSON. Redirects are not followed. An answer of 4xx other than 408, 425 and 429
    says that trying again is of no use. The URL is used as it is given, wherever it leads.
    """

    api = 1

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            self._secure, self._host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        except ValueError as error:
            raise InvalidArgument(f"{shown(url)} is no URL: {error}") from error
        if not self._host or parts.username is not None or any(ord(char) <= 32 for char in url):
            raise InvalidArgument(f"the URL of a receiver is http://HOST:PORT/PATH, without a user, not {shown(url)}")
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        """Connections that are open and not in use."""
        self._closed = False

    def deliver(self, messages: Sequence[Message]) -> None:
        """Post each message, and wait for its answer."""
        for message in messages:
            status = self._post(envelope_bytes(message))
            if not 200 <= status < 300:
                retryable = not 400 <= status < 500 or status in _RETRYABLE
                raise DeliveryRefused(f"{self._host} answered {status}", retryable=retryable)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _post(self, body: bytes) -> int:
        """Send a request; returns the status of the answer."""
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                return self._send(kept, body)
            except (http.client.HTTPException, OSError):
                kept.close()  # the receiver has closed what was kept open: once more, with a new connection
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            return self._send(connection, body)
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise DeliveryRefused(f"cannot deliver to {self._host}: {type(error).__name__}: {error}") from error

    def _send(self, connection: http.client.HTTPConnection, body: bytes) -> int:
        headers = {"Content-Type": "application/json", "User-Agent": "headrace"}
        connection.request("POST", self._path, body, headers)
        answer = connection.getresponse()
        answer.read(_ANSWER_BYTES_MAX)
        with self._lock:
            keeps = not self._closed and not answer.will_close and answer.isclosed()
            if keeps:
                self._idle.append(connection)
        if not keeps:
            connection.close()  # or the rest of a long answer would have to be read
        return answer.status
