"""Quotas of a tenant, what it uses of them, and how both are named."""

from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.model.arguments import shortened, shown
from headrace.model.errors import InvalidArgument
from headrace.model.limits import DESCRIPTION_CHARS_MAX, RATE_MAX
from headrace.model.request import WireStruct
from headrace.model.type_info import build_type_info


class TenantUsage(WireStruct):
    """What a tenant uses: every field but the last has a quota of the same name."""

    topics: int = 0
    partitions: int = 0
    """Of all topics, virtual ones included."""
    subscriptions: int = 0
    """Leased subscriptions."""
    groups: int = 0
    connections: int = 0
    """Sessions of all gateways."""
    transactions: int = 0
    """Open transactions."""
    staged_bytes: int = 0
    """Staged by open transactions."""
    schedules: int = 0
    routes: int = 0
    webhooks: int = 0
    stored_bytes: int = 0
    """Of all topics on the disk and in memory."""
    pending_messages: int = 0
    """Messages that leased subscriptions have not settled: those on the timeline included."""
    services: int = 0
    """Registered instances of services."""


COUNTED = (
    "topics", "partitions", "subscriptions", "groups", "connections",
    "transactions", "staged_bytes", "schedules", "routes", "webhooks",
)  # fmt: skip
"""What is counted whenever it changes; the number is always exact."""
MEASURED = ("stored_bytes", "pending_messages")
"""What is measured now and then, and estimated in between."""
RATES = ("messages_in", "bytes_in", "messages_out", "bytes_out")
"""What is limited per second: published messages, and those that are read or delivered."""


class TenantQuotas(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The most that a tenant may use, each None for no limit of its own."""

    topics: int | None = None
    partitions: int | None = None
    subscriptions: int | None = None
    groups: int | None = None
    connections: int | None = None
    transactions: int | None = None
    staged_bytes: int | None = None
    schedules: int | None = None
    routes: int | None = None
    webhooks: int | None = None
    stored_bytes: int | None = None
    pending_messages: int | None = None
    messages_in: int | None = None
    """Published messages per second."""
    bytes_in: int | None = None
    """Bytes of published batches per second, as they arrive."""
    messages_out: int | None = None
    """Messages per second that are read, leased or delivered."""
    bytes_out: int | None = None
    """Bytes per second that are read, leased or delivered."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            quota = getattr(self, name)
            least = 1 if name in RATES else 0
            if quota is not None and not least <= quota <= RATE_MAX:
                raise InvalidArgument(f"the quota {name} must be {least} to {RATE_MAX}, not {quota}")


build_type_info(TenantQuotas)


def given_quotas(quotas: TenantQuotas) -> dict[str, int]:
    """The quotas that there are, by name.

    >>> given_quotas(TenantQuotas(topics=3))
    {'topics': 3}
    """
    return {name: quota for name in quotas.__struct_fields__ if (quota := getattr(quotas, name)) is not None}


def merged_quotas(quotas: TenantQuotas, defaults: TenantQuotas) -> TenantQuotas:
    """The quotas, and the defaults where there is none."""
    return TenantQuotas(**{**given_quotas(defaults), **given_quotas(quotas)})


def altered_quotas(given: dict[str, Any], base: TenantQuotas | None = None) -> TenantQuotas:
    """Quotas from plain values by name, over those of `base`; None removes one. Says which one is wrong.

    >>> given_quotas(altered_quotas({"topics": 20, "groups": None}, TenantQuotas(groups=5)))
    {'topics': 20}
    """
    merged = {**given_quotas(base or TenantQuotas()), **given}
    try:
        return msgspec.convert(merged, TenantQuotas)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise InvalidArgument(
            f"quotas are wrong: {shortened(cause or error)}; there are {', '.join(TenantQuotas.__struct_fields__)}"
        ) from error


def quotas_of(texts: Iterable[str]) -> TenantQuotas:
    """Quotas from texts such as `topics=100`.

    >>> given_quotas(quotas_of(["topics=100", "bytes_in=1000000"]))
    {'topics': 100, 'bytes_in': 1000000}
    """
    given = {}
    for text in texts:
        name, equals, number = text.partition("=")
        if not equals or not number.isascii() or not number.isdigit():
            raise InvalidArgument(f"a quota is written NAME=NUMBER, such as topics=100, not {shown(text)}")
        given[name] = int(number)
    return altered_quotas(given)


def checked_description(text: str) -> str:
    """The description of a tenant, if it is one short line."""
    if len(text) > DESCRIPTION_CHARS_MAX or not text.isprintable():
        raise InvalidArgument(f"a description is one line of at most {DESCRIPTION_CHARS_MAX} printable characters")
    return text
