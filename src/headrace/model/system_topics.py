"""The topics that belong to Headrace itself, and the settings that they are created with."""

from collections.abc import Container, Iterable
from typing import Any

from headrace.model.errors import InvalidArgument
from headrace.model.job_requests import RESULTS_TOPIC

EVENTS_TOPIC = "headrace.events"
"""Every change of the bus's own structures, as JSON: see `BusEvent`."""
ERRORS_TOPIC = "headrace.errors"
"""The errors that services have reported, as JSON: see `ServiceError`."""
AUDIT_TOPIC = "headrace.audit"
"""Who did what, or tried to, as JSON, each record with the digest of the one before: see `AuditRecord`."""
INGRESS_TOPIC = "headrace.ingress"
"""Messages that were published without a topic, or to a subject that a route takes: routes carry them on."""
ARCHIVE_TOPIC = "headrace.archive"
"""The manifest of the archives: which messages of which topic are in which Parquet file. The archiver writes to it."""

BROKER_TOPICS = frozenset({EVENTS_TOPIC, ERRORS_TOPIC, AUDIT_TOPIC, RESULTS_TOPIC})
"""Those that only the broker writes to: whoever reads them relies on what is in there."""

_DAY_SECONDS = 86_400.0

SYSTEM_TOPICS: dict[str, dict[str, Any]] = {
    EVENTS_TOPIC: {"retain_bytes": 16 << 20, "durability": "written"},
    ERRORS_TOPIC: {"retain_bytes": 64 << 20, "retain_seconds": 30 * _DAY_SECONDS, "durability": "written"},
    AUDIT_TOPIC: {
        "partitions": 1,
        "storage": "disk",
        "validity": "keep",
        "retain_seconds": None,
        "retain_bytes": 1 << 30,
        "ttl_seconds": None,
        "compact_by_key": False,
        "key_versions": False,
        "message_bytes_max": 1 << 20,
        "durability": "synced",
    },
    INGRESS_TOPIC: {"retain_seconds": _DAY_SECONDS},
}
"""Settings by name, without the tenant: each tenant has topics of its own, created on demand."""


def check_clients_topic(name: str) -> None:
    """Refuse a topic to which only the broker writes, given with or without its tenant.

    >>> check_clients_topic("acme/headrace.ingress")
    >>> check_clients_topic("acme/headrace.events")
    Traceback (most recent call last):
    headrace.model.errors.InvalidArgument: only the broker itself writes to acme/headrace.events: use another topic
    """
    if name.rpartition("/")[2] in BROKER_TOPICS:
        raise InvalidArgument(f"only the broker itself writes to {name}: use another topic")


AUDIT_SETTINGS = frozenset({"retain_seconds", "retain_bytes", "segment_bytes", "segment_seconds"})
"""The settings of an audit trail that can be altered: none of them changes a record."""


def check_audit_settings(name: str, given: Iterable[str], allowed: Container[str] = ()) -> None:
    """Refuse settings of an audit trail that would change what is in it.

    >>> check_audit_settings("acme/orders", {"compact_by_key": True})
    >>> check_audit_settings("headrace.audit", {"compact_by_key": True}, AUDIT_SETTINGS)
    Traceback (most recent call last):
    headrace.model.errors.InvalidArgument: compact_by_key of headrace.audit cannot be set: the broker decides it
    """
    if name.rpartition("/")[2] != AUDIT_TOPIC:
        return
    for setting in given:
        if setting not in allowed:
            raise InvalidArgument(f"{setting} of {name} cannot be set: the broker decides it")
