"""The permission of a receiver, by the abuse protection of CloudEvents' HTTP webhooks, asked before any message."""

import re
from dataclasses import dataclass

from headrace.push.http_client import OutgoingClient, OutgoingResponse

_RATE = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class ReceiverPermission:
    """What a receiver answered."""

    is_granted: bool
    interval_us: int = 0
    """At least so long between two requests; 0 for any rate."""
    reason: str = ""
    """Why not, if it is not granted."""
    is_final: bool = True
    """Whether the receiver itself decided; else asking again may help."""


async def ask_permission(client: OutgoingClient, url: str, origin: str, timeout_s: float) -> ReceiverPermission:
    """Ask a receiver whether it takes messages of this origin."""
    headers = {"WebHook-Request-Origin": origin, "WebHook-Request-Rate": "*"}
    return read_permission(await client.send("OPTIONS", url, headers, b"", timeout_s), origin)


def read_permission(response: OutgoingResponse, origin: str) -> ReceiverPermission:
    """What the answer of a receiver means."""
    if response.status >= 500 or response.status in (408, 429):
        return ReceiverPermission(False, reason=f"it answered OPTIONS with {response.status}", is_final=False)
    if not 200 <= response.status < 300:
        return ReceiverPermission(False, reason=f"it answered OPTIONS with {response.status}")
    allowed = [one.strip().lower() for one in response.headers.get("webhook-allowed-origin", "").split(",")]
    if "*" not in allowed and origin.lower() not in allowed:
        return ReceiverPermission(False, reason=f"its WebHook-Allowed-Origin does not name {origin}")
    rate = response.headers.get("webhook-allowed-rate", "*").strip()
    if rate == "*":
        return ReceiverPermission(True)
    if not _RATE.fullmatch(rate) or int(rate) == 0:
        return ReceiverPermission(False, reason="its WebHook-Allowed-Rate is no number of requests per minute")
    return ReceiverPermission(True, 60_000_000 // int(rate))
