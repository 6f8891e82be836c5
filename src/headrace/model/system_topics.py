"""The topics that belong to Headrace itself, and the settings that they are created with."""

from typing import Any

INGRESS_TOPIC = "headrace.ingress"
"""Messages that were published without a topic, or to a subject that a route takes: routes carry them on."""

_DAY_SECONDS = 86_400.0

SYSTEM_TOPICS: dict[str, dict[str, Any]] = {
    INGRESS_TOPIC: {"retain_seconds": _DAY_SECONDS},
}
"""Settings by name, without the tenant: each tenant has topics of its own, created on demand."""
