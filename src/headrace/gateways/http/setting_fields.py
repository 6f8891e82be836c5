"""Settings of topics and subscriptions as bodies have them: each may be left out."""

from enum import Enum
from typing import Any, Literal

import msgspec

from headrace.gateways.http.route import bounded
from headrace.model.durability import Durability
from headrace.model.subscription import SubscriptionSettings
from headrace.model.topic import TopicSettings


def _settings_fields(settings: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct with the same settings, in plain values."""
    fields: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(settings):
        kind = bounded(field.type)
        if field.type is Durability:
            kind = Literal["memory", "written", "synced", "replicated"]
        elif isinstance(field.type, type) and issubclass(field.type, Enum):
            kind = Literal[tuple(one.value for one in field.type)]
        fields.append((field.name, kind | msgspec.UnsetType, msgspec.UNSET))
    return msgspec.defstruct(
        f"{settings.__name__}Fields",
        fields,
        forbid_unknown_fields=True,
        kw_only=True,
        namespace={"source_struct": settings},
    )


TopicSettingsFields = _settings_fields(TopicSettings)
SubscriptionSettingsFields = _settings_fields(SubscriptionSettings)
