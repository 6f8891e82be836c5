"""Validates lease, settlement and credit requests."""

from headrace.model.errors import InvalidArgument, ProtocolError
from headrace.model.leasing import Holding, Lease, Release
from headrace.model.limits import (
    AHEAD_SECONDS_MAX,
    LEASE_MESSAGES_MAX,
    LEASE_SECONDS_MAX,
    STATE_BYTES_MAX,
    TIMESTAMP_US_MAX,
)
from headrace.model.standing_lease import LeaseCredit, LeaseOpen

_WAIT_MS_MAX = 600_000

_DELAY_MS_MAX = 1 << 46
"""More than two thousand years, and what ends then is still before the latest time."""


def check_lease(request: Lease) -> None:
    """Refuse an invalid lease request."""
    if not 0 < request.messages_max <= LEASE_MESSAGES_MAX:
        raise InvalidArgument(f"messages_max is 1 to {LEASE_MESSAGES_MAX}, not {request.messages_max}")
    if request.bytes_max < 1:
        raise InvalidArgument(f"bytes_max is 1 at least, not {request.bytes_max}")
    if not 0 <= request.wait_ms <= _WAIT_MS_MAX:
        raise InvalidArgument(f"wait_ms is 0 to {_WAIT_MS_MAX}, not {request.wait_ms}")
    _check_ahead_ms(request.ahead_ms)
    check_lease_ms(request.lease_ms)


def check_lease_open(request: LeaseOpen) -> None:
    """Refuse an invalid standing request."""
    _check_credit(request.credit_messages, request.credit_bytes)
    _check_ahead_ms(request.ahead_ms)
    check_lease_ms(request.lease_ms)


def check_lease_credit(request: LeaseCredit) -> None:
    """Refuse invalid credit."""
    if request.messages < 0 or request.bytes < 0:
        raise ProtocolError("credit must not be negative")
    if request.ahead_ms is not None:
        _check_ahead_ms(request.ahead_ms)


def _check_credit(messages: int, size_bytes: int) -> None:
    if messages < 0 or size_bytes < 0:
        raise InvalidArgument(f"credit is 0 at least, not {messages} messages and {size_bytes} bytes")


def _check_ahead_ms(ahead_ms: int) -> None:
    if not 0 <= ahead_ms <= AHEAD_SECONDS_MAX * 1000:
        raise InvalidArgument(f"ahead_ms is 0 to {AHEAD_SECONDS_MAX * 1000}, not {ahead_ms}")


def check_lease_ms(lease_ms: int) -> None:
    """Refuse an invalid lease duration."""
    if not 0 <= lease_ms <= LEASE_SECONDS_MAX * 1000:
        raise InvalidArgument(f"lease_ms is 0 to {LEASE_SECONDS_MAX * 1000}, not {lease_ms}")


def check_holdings(holdings: list[Holding]) -> None:
    """Refuse invalid or too many offsets."""
    count = 0
    for holding in holdings:
        if holding.following < 0 or (holding.following and not holding.offsets):
            raise InvalidArgument("following is the number of messages that follow the last of the offsets")
        count += len(holding.offsets) + holding.following
    if count > LEASE_MESSAGES_MAX:
        raise InvalidArgument(f"at most {LEASE_MESSAGES_MAX} messages can be settled at once")


def check_release(request: Release) -> None:
    """Refuse a release with an invalid delay or time, or a state that is too large."""
    if request.delay_ms is not None and request.until_us is not None:
        raise InvalidArgument("give either delay_ms or until_us, not both")
    if request.delay_ms is not None and not 0 <= request.delay_ms <= _DELAY_MS_MAX:
        raise InvalidArgument(f"delay_ms cannot be {request.delay_ms}")
    if request.until_us is not None and not 0 <= request.until_us <= TIMESTAMP_US_MAX:
        raise InvalidArgument(f"until_us cannot be {request.until_us}")
    if any(len(state) > STATE_BYTES_MAX for state in request.states.values()):
        raise InvalidArgument(f"a state has at most {STATE_BYTES_MAX} bytes")
    if request.states and len(request.holdings) != 1:
        raise InvalidArgument("states can be given for the messages of one holding only")
