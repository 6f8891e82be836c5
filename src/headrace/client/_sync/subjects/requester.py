"""Sends requests to subjects, and takes their replies."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from headrace.client._sync.concurrency import Monitor, now
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client._sync.subjects.reply_callbacks import ReplyCallbacks
from headrace.client.connection.backoff import Backoff
from headrace.client.connection.request_router import Bytes
from headrace.client.connection.retrying import NOTHING_DONE
from headrace.client.subjects.messages import Reply
from headrace.client.subjects.reply_targets import ReplyTarget
from headrace.model.arguments import shown
from headrace.model.errors import HeadraceError, InvalidArgument, NoResponders
from headrace.model.headers import Headers
from headrace.model.limits import MESSAGE_BYTES_MAX, REQUEST_SECONDS_MAX
from headrace.model.message import check_message_bytes, message_size
from headrace.model.subject_requests import RequestReply, RequestSend

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

_GRACE_S = 1.0
"""The broker keeps the time; the client waits so much longer, in case the broker is not there any more."""


class Requester:
    """The requests of a bus."""

    def __init__(self, broker: ReconnectingConnection) -> None:
        self._broker = broker
        self._monitor = Monitor()
        self._callbacks = ReplyCallbacks()

    def request(self, subject: str, value: bytes, headers: Headers | None, timeout: float) -> Reply:
        """Send a request, and wait for the reply.

        It is sent again if the broker was too busy or throttled it; also if nobody serves the subject right after the
        broker was restarted or replaced, as responders connect again, too.
        """
        deadline, backoff = now() + timeout, Backoff()
        send = _checked(subject, value, headers, timeout)
        while True:
            connection = self._broker.connection
            if connection is None or connection.closed:
                connection = self._broker.get(deadline)
            try:
                answer, body = connection.request(send, value, timeout + _GRACE_S)
            except (*NOTHING_DONE, NoResponders) as error:
                wait_s = backoff.next_s()
                is_final = isinstance(error, NoResponders) and not self._broker.was_just_replaced
                if is_final or now() + wait_s >= deadline:
                    raise
            else:
                return _reply(answer, body)
            with self._monitor.guard:
                self._monitor.wait(wait_s)
            timeout = deadline - now()
            send.timeout_ms = max(1, round(timeout * 1000))

    def request_later(
        self,
        bus: "Bus",
        subject: str,
        value: bytes,
        headers: Headers | None,
        timeout: float,
        target: ReplyTarget,
    ) -> None:
        """Send a request whose reply, or error, goes to a target; the bus publishes it if that is a topic."""
        send = _checked(subject, value, headers, timeout)
        connection = self._broker.get(now() + timeout)
        told: Callable[[RequestReply | HeadraceError, Bytes], None] = partial(self._told, bus, subject, target)
        connection.request_nowait(send, value, told, timeout + _GRACE_S)

    def _told(
        self, bus: "Bus", subject: str, target: ReplyTarget, answer: RequestReply | HeadraceError, body: Bytes
    ) -> None:
        outcome = answer if isinstance(answer, HeadraceError) else _reply(answer, body)
        self._callbacks.add(bus, subject, target, outcome)

    def close(self, timeout: float) -> None:
        """Wait until all replies that have come are where they belong."""
        self._callbacks.close(timeout)

    def disown(self) -> None:
        """In a forked child: begin anew."""
        self._monitor = Monitor()
        self._callbacks.disown()


def _reply(answer: RequestReply, body: Bytes) -> Reply:
    reply = Reply(bytes(body))
    reply.headers = answer.headers
    return reply


def _checked(subject: str, value: bytes, headers: Headers | None, timeout: float) -> RequestSend:
    if not isinstance(subject, str):
        raise InvalidArgument(f"a subject is a string, such as 'price.quote', not {shown(subject)}")
    check_message_bytes(message_size(value, None, headers), MESSAGE_BYTES_MAX)
    timeout_ms = min(max(1, round(timeout * 1000)), REQUEST_SECONDS_MAX * 1000)
    return RequestSend(subject, timeout_ms, headers or {})
