"""What the parts of a webhook may be: its definition, its secrets, and the settings of its leased subscription."""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.model.arguments import shortened, shown
from headrace.model.errors import InvalidArgument
from headrace.model.limits import (
    WEBHOOK_BATCH_MAX,
    WEBHOOK_CONCURRENCY_MAX,
    WEBHOOK_HEADERS_BYTES_MAX,
    WEBHOOK_HEADERS_MAX,
    WEBHOOK_TIMEOUT_SECONDS_MAX,
)
from headrace.model.receiver_url import parse_receiver_url
from headrace.model.subscription import SubscriptionSettings, subscription_settings
from headrace.model.topic import DEFAULT_TENANT, checked_plain_name, parse_topic, tenant_of
from headrace.model.webhook_requests import HIDDEN, WebhookDefinition

FORMATS = ("envelope", "raw", "cloudevents-binary", "cloudevents-structured", "cloudevents-batch")
_SINGLE_FORMATS = frozenset({"raw", "cloudevents-binary", "cloudevents-structured"})
"""Formats whose body is one message."""
SECRET_PREFIX = "whsec_"
SECRETS_MAX = 2
_SECRET_BYTES = range(24, 65)
"""By Standard Webhooks."""

_DEFAULTS: dict[str, Any] = {"deliveries_max": 16, "retry_seconds": 5.0, "retry_seconds_max": 21_600.0}
"""Sixteen attempts in about a day: after 5 s, then twice as long each time, up to 6 hours."""
OWN_SETTINGS = frozenset(
    {"ordered_by_key", "paused", "lease_seconds", "single_active_consumer", "delete_unused_seconds"}
)
"""Settings of subscriptions that a webhook sets itself."""

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e\t]*[\x21-\x7e])?|")
_ORIGIN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_RESERVED = frozenset(
    {
        *{"host", "content-type", "content-length", "transfer-encoding", "connection", "keep-alive", "upgrade"},
        *{"te", "trailer", "expect", "proxy-connection", "accept-encoding"},
        *{"webhook-id", "webhook-timestamp", "webhook-signature"},
    }
)
"""Headers that say how a request is framed or signed."""
_RESERVED_PREFIXES = ("ce-", "headrace-")


def checked_webhook(definition: WebhookDefinition) -> WebhookDefinition:
    """The definition with full names, if all of it can be used."""
    name = checked_webhook_name(definition.name)
    topic = str(parse_topic(definition.topic))
    if tenant_of(topic) != tenant_of(name):
        raise InvalidArgument(f"the webhook {name} and its topic {topic} belong to different tenants; use one of them")
    url = parse_receiver_url(definition.url).text
    if definition.format not in FORMATS:
        raise InvalidArgument(f"the format of a webhook is one of {', '.join(FORMATS)}, not {shown(definition.format)}")
    _between("batch_max", definition.batch_max, 1, WEBHOOK_BATCH_MAX)
    _between("concurrency", definition.concurrency, 1, WEBHOOK_CONCURRENCY_MAX)
    if not 0.1 <= definition.timeout_seconds <= WEBHOOK_TIMEOUT_SECONDS_MAX:
        raise InvalidArgument(
            f"timeout_seconds is 0.1 to {WEBHOOK_TIMEOUT_SECONDS_MAX:.0f}, not {definition.timeout_seconds}"
        )
    if definition.batch_max > 1 and definition.format in _SINGLE_FORMATS:
        raise InvalidArgument(
            f"a request in the format {definition.format} has one message: leave out batch_max, or use envelope or "
            "cloudevents-batch"
        )
    if definition.origin and not _ORIGIN.fullmatch(definition.origin):
        raise InvalidArgument(f"origin is a DNS name such as broker.example.org, not {shown(definition.origin)}")
    webhook_settings(definition)
    headers = _checked_headers(definition.headers)
    return msgspec.structs.replace(definition, name=name, topic=topic, url=url, headers=headers)


def checked_webhook_name(name: str) -> str:
    """The name, if it may be a webhook's, without the default tenant."""
    tenant, slash, bare = name.rpartition("/")
    checked_plain_name(bare, "webhook")
    if slash:
        checked_plain_name(tenant, "tenant")
    return bare if tenant == DEFAULT_TENANT else name


def altered_webhook(definition: WebhookDefinition, changes: Mapping[str, Any]) -> WebhookDefinition:
    """The definition with these changes, if that can be used; `headers` and `settings` are merged."""
    plain: dict[str, Any] = {field: getattr(definition, field) for field in definition.__struct_fields__}
    for field, given in changes.items():
        if field not in plain:
            raise InvalidArgument(f"a webhook has no {shown(field)}; it has {', '.join(plain)}")
        if field in ("name", "topic") and given != plain[field]:
            raise InvalidArgument(
                f"the {field} of a webhook cannot be changed: define another one, and delete this one"
            )
        if field in ("headers", "settings") and isinstance(given, Mapping):
            merged = {**plain[field], **given}
            plain[field] = {key: one for key, one in merged.items() if one is not None}
        else:
            plain[field] = given
    try:
        altered = msgspec.convert(plain, WebhookDefinition)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"the webhook cannot be changed like this: {shortened(error)}") from error
    return checked_webhook(with_kept_headers(altered, definition))


def webhook_settings(definition: WebhookDefinition) -> SubscriptionSettings:
    """The settings of a webhook's leased subscription.

    >>> settings = webhook_settings(WebhookDefinition("a", "orders", "https://example.org/"))
    >>> settings.deliveries_max, round(sum(settings.retry_us(nth, 0.5) for nth in range(1, 16)) / 3.6e9)
    (16, 23)
    """
    own = sorted(OWN_SETTINGS & definition.settings.keys())
    if own:
        raise InvalidArgument(f"a webhook sets {', '.join(own)} of its subscription itself: leave it out of settings")
    given = {**_DEFAULTS, **definition.settings, "ordered_by_key": definition.ordered_by_key}
    return subscription_settings(given)


# Headers.


def shown_webhook(definition: WebhookDefinition) -> WebhookDefinition:
    """The definition as it is told: values of headers are hidden, because any may be a credential."""
    return msgspec.structs.replace(definition, headers=dict.fromkeys(definition.headers, HIDDEN))


def with_kept_headers(definition: WebhookDefinition, before: WebhookDefinition | None) -> WebhookDefinition:
    """The definition in which headers that are given as hidden have the values that they had."""
    known = {} if before is None else {name.lower(): text for name, text in before.headers.items()}
    headers = {}
    for name, text in definition.headers.items():
        if text == HIDDEN and name.lower() not in known:
            raise InvalidArgument(f"the webhook has no header {shown(name)} whose value could stay; give one")
        headers[name] = known[name.lower()] if text == HIDDEN else text
    return msgspec.structs.replace(definition, headers=headers)


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    if len(headers) > WEBHOOK_HEADERS_MAX:
        raise InvalidArgument(f"a webhook has at most {WEBHOOK_HEADERS_MAX} headers, not {len(headers)}")
    if sum(len(name) + len(text) for name, text in headers.items()) > WEBHOOK_HEADERS_BYTES_MAX:
        raise InvalidArgument(f"the headers of a webhook have more than {WEBHOOK_HEADERS_BYTES_MAX} bytes")
    if len({name.lower() for name in headers}) != len(headers):
        raise InvalidArgument("a header of the webhook stands there twice; give each once")
    for name, text in headers.items():
        if not _TOKEN.fullmatch(name):
            raise InvalidArgument(f"{shown(name)} cannot be the name of a header")
        if name.lower() in _RESERVED or name.lower().startswith(_RESERVED_PREFIXES):
            raise InvalidArgument(f"the broker itself sets the header {name}; leave it out")
        if not _VALUE.fullmatch(text):  # not shown: it may be a credential
            raise InvalidArgument(
                f"the header {name} has a character that is not printable ASCII, or a space at an end"
            )
    return dict(headers)


# Secrets, by Standard Webhooks.


def secret_key(secret: str) -> bytes:
    """The key that a secret stands for; the error does not show the secret.

    >>> len(secret_key("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"))
    24
    """
    wrong = InvalidArgument(
        f"a secret of a webhook is {SECRET_PREFIX} and the base64 of {_SECRET_BYTES[0]} to {_SECRET_BYTES[-1]} bytes"
    )
    if not secret.startswith(SECRET_PREFIX):
        raise wrong
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise wrong from None
    if len(key) not in _SECRET_BYTES:
        raise wrong
    return key


def secret_text(key: bytes) -> str:
    """The secret that stands for a key."""
    return SECRET_PREFIX + base64.b64encode(key).decode()


def checked_secrets(secrets: list[str]) -> list[str]:
    """The secrets, if a webhook may have them."""
    if not 1 <= len(secrets) <= SECRETS_MAX:
        raise InvalidArgument(f"a webhook has one secret, or two while they are changed, not {len(secrets)}")
    for secret in secrets:
        secret_key(secret)
    return list(secrets)


def _between(name: str, given: int, least: int, most: int) -> None:
    if not least <= given <= most:
        raise InvalidArgument(f"{name} is {least} to {most}, not {given}")
