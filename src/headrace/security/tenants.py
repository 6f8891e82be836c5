"""The definition of a tenant."""

import msgspec

from headrace.model.tenant import TenantQuotas


class TenantDefinition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is defined of a tenant; fields with defaults can be added, and earlier journals stay readable."""

    created_us: int = 0
    description: str = ""
    quotas: TenantQuotas = TenantQuotas()
    deleting: bool = False
    """Whether it is being deleted: it cannot be used any more, and its deletion goes on after a restart."""
