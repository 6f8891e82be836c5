"""WebSub (W3C Recommendation): the terms of a subscription, and what a hub sends, without any I/O."""

import hmac
import re
from collections.abc import Mapping
from hashlib import sha256
from urllib.parse import urlencode

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.limits import (
    WEBSUB_LEASE_SECONDS,
    WEBSUB_LEASE_SECONDS_MAX,
    WEBSUB_LEASE_SECONDS_MIN,
    WEBSUB_SECRET_BYTES_MAX,
)
from headrace.model.request import WireStruct

NAME_PREFIX = "websub-"
_NAME_CHARS = 24
_LINKED = re.compile(r"https?://[!#-;=?-~]{1,2040}")
"""A URL that can stand in a header Link."""


class WebSubTerms(WireStruct):
    """What makes a webhook a WebSub subscription."""

    topic_url: str
    """The topic as the subscriber names it."""
    hub_url: str
    """The hub to which the subscriber sent its request."""
    lease_seconds: int
    lease_end_us: int
    """It is deleted then, unless the subscriber has renewed it."""


def subscription_name(callback: str, topic_url: str) -> str:
    """The name of the webhook of a subscriber: by WebSub the callback and the topic tell subscriptions apart.

    >>> subscription_name("https://a.example/", "http://hub.example/v1/topics/orders/messages")
    'websub-d19dc20d928fd19b373c3e26'
    """
    return NAME_PREFIX + sha256(f"{callback}\n{topic_url}".encode()).hexdigest()[:_NAME_CHARS]


def granted_lease(wanted_seconds: int | None) -> int:
    """How long a subscription lasts for which the subscriber asks for so long."""
    if wanted_seconds is None:
        return WEBSUB_LEASE_SECONDS
    return min(max(wanted_seconds, WEBSUB_LEASE_SECONDS_MIN), WEBSUB_LEASE_SECONDS_MAX)


def checked_secret(secret: str) -> str:
    """The secret of a subscriber, if it is short enough; the error does not show it."""
    if len(secret.encode()) > WEBSUB_SECRET_BYTES_MAX:
        raise InvalidArgument(f"hub.secret has fewer than 200 bytes, not {len(secret.encode())}")
    return secret


def checked_link(url: str) -> str:
    """The URL, if it can stand in the header Link."""
    if not _LINKED.fullmatch(url):
        raise InvalidArgument(f'a URL of a hub or of a topic is printable ASCII without <, > and ", not {shown(url)}')
    return url


def callback_url(callback: str, fields: Mapping[str, str]) -> str:
    """The callback with more fields in its query; those that it has stay.

    >>> callback_url("https://a.example/cb?id=7", {"hub.mode": "subscribe", "hub.topic": "http://b/?c"})
    'https://a.example/cb?id=7&hub.mode=subscribe&hub.topic=http%3A%2F%2Fb%2F%3Fc'
    """
    return f"{callback}{'&' if '?' in callback else '?'}{urlencode(fields)}"


def link_header(hub_url: str, topic_url: str) -> str:
    """The header Link, by which a subscriber finds the hub and the topic.

    >>> link_header("http://b/v1/hub", "http://b/v1/topics/t/messages")
    '<http://b/v1/hub>; rel="hub", <http://b/v1/topics/t/messages>; rel="self"'
    """
    return f'<{hub_url}>; rel="hub", <{topic_url}>; rel="self"'


def content_signature(secret: str, body: bytes) -> str:
    """The header X-Hub-Signature.

    >>> content_signature("secret", b"hello")
    'sha256=88aab3ede8d3adf94d26ab90d3bafd4a2083070c3bcce9c014ee04a443847c0b'
    """
    return f"sha256={hmac.new(secret.encode(), body, sha256).hexdigest()}"
