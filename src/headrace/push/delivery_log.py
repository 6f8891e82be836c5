"""The last requests of a webhook, in memory."""

from collections import deque

from headrace.model.limits import WEBHOOK_LOG_MAX
from headrace.model.webhook_requests import WebhookDelivery


class DeliveryLog:
    """A ring of the newest requests, and counts of what became of messages."""

    def __init__(self) -> None:
        self._entries: deque[WebhookDelivery] = deque(maxlen=WEBHOOK_LOG_MAX)
        self.delivered = 0
        self.failed = 0
        self.last_error = ""

    def add(self, entry: WebhookDelivery) -> None:
        """Add a request that has ended."""
        self._entries.append(entry)
        if entry.offset < 0:
            return  # a test
        self.last_error = entry.error
        if entry.error:
            self.failed += entry.messages
        else:
            self.delivered += entry.messages

    def newest(self) -> list[WebhookDelivery]:
        """All entries, the newest first."""
        return list(reversed(self._entries))
