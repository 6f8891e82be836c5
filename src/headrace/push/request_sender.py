"""Sends one request of a webhook: formats the messages, signs the body, and reads the receiver's answer."""

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from headrace.model.errors import HeadraceError
from headrace.push.http_client import OutgoingClient, OutgoingResponse
from headrace.push.leased_messages import LeasedMessage
from headrace.push.request_formats import DeliverySource, OutgoingRequest, format_request
from headrace.push.retry_after import retry_after_us
from headrace.push.signatures import hub_headers, signature_headers

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.broker.webhook_facts import WebhookStored

logger = logging.getLogger("headrace.push")

_INLINE_BYTES = 256 << 10
"""Larger requests are formatted and signed on another thread: the event loop must not wait for them."""
_ERROR_CHARS = 200
"""Of the body of an answer that is kept as the reason."""


class Answered(NamedTuple):
    """What a receiver answered."""

    status: int = 0
    """0: nothing."""
    error: str = ""
    """Why the messages are not delivered; empty if they are."""
    retry_after_us: int | None = None
    bytes: int = 0
    """The size of the body that was sent."""


class RequestSender:
    """Sends requests with one client."""

    def __init__(self, client: OutgoingClient, time_of_day_us: "Callable[[], int]") -> None:
        """Prepare; signatures have the time of day, whatever the broker's clock says."""
        self.client = client
        self._time_of_day_us = time_of_day_us

    async def send(
        self, fact: "WebhookStored", messages: Sequence[LeasedMessage], source: DeliverySource, message_id: str
    ) -> Answered:
        """Send messages; whatever goes wrong is an answer with an error."""
        definition = fact.definition
        request: OutgoingRequest | None = None
        try:
            if sum(one.bytes for one in messages) > _INLINE_BYTES:
                loop = asyncio.get_running_loop()
                request = await loop.run_in_executor(None, self._signed, fact, messages, source, message_id)
            else:
                request = self._signed(fact, messages, source, message_id)
            headers, body = request
            response = await self.client.send("POST", definition.url, headers, body, definition.timeout_seconds)
        except HeadraceError as error:
            return Answered(error=str(error), bytes=0 if request is None else len(request.body))
        except Exception as error:
            logger.exception("webhook request failed  webhook=%s", definition.name)
            return Answered(error=f"the request failed: {type(error).__name__}")
        return self._read(response, len(body))

    def _signed(
        self, fact: "WebhookStored", messages: Sequence[LeasedMessage], source: DeliverySource, message_id: str
    ) -> OutgoingRequest:
        headers, body = format_request(fact.definition, messages, source)
        terms = fact.definition.websub
        if terms is None:
            signed = signature_headers(fact.secrets, message_id, self._time_of_day_us(), body)
        else:
            signed = hub_headers(terms, fact.secrets, message_id, body)
        return OutgoingRequest({**headers, **signed}, body)

    def _read(self, response: OutgoingResponse, size_bytes: int) -> Answered:
        status = response.status
        wait_us = retry_after_us(response.headers.get("retry-after"), self._time_of_day_us())
        if 200 <= status < 300:
            return Answered(status, "", wait_us, size_bytes)
        try:
            phrase = f" {HTTPStatus(status).phrase}"
        except ValueError:
            phrase = ""
        error = f"the receiver answered {status}{phrase}"
        if 300 <= status < 400:
            error += ", and redirects are not followed: give the webhook the URL it leads to"
        elif text := _readable(response.body):
            error += f": {text}"
        return Answered(status, error, wait_us, size_bytes)


def _readable(body: bytes) -> str:
    """The beginning of a body on one line, without what would confuse a terminal."""
    text = body[: 4 * _ERROR_CHARS].decode("utf-8", "replace")[:_ERROR_CHARS]
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())
