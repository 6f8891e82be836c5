"""The topics that belong to Headrace itself, and the settings that they are created with."""

from typing import Any

from headrace.model.errors import InvalidArgument
from headrace.model.job_requests import RESULTS_TOPIC

EVENTS_TOPIC = "headrace.events"
"""Every change of the bus's own structures, as JSON: see `BusEvent`."""
ERRORS_TOPIC = "headrace.errors"
"""The errors that services have reported, as JSON: see `ServiceError`."""
INGRESS_TOPIC = "headrace.ingress"
"""Messages that were published without a topic, or to a subject that a route takes: routes carry them on."""

BROKER_TOPICS = frozenset({EVENTS_TOPIC, ERRORS_TOPIC, RESULTS_TOPIC})
"""Those that only the broker writes to: whoever reads them relies on what is in there."""

_DAY_SECONDS = 86_400.0

SYSTEM_TOPICS: dict[str, dict[str, Any]] = {
    EVENTS_TOPIC: {"retain_bytes": 16 << 20, "durability": "written"},
    ERRORS_TOPIC: {"retain_bytes": 64 << 20, "retain_seconds": 30 * _DAY_SECONDS, "durability": "written"},
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
