"""The settings of a broker."""

import msgspec

from headrace.model.errors import InvalidArgument
from headrace.model.limits import SECONDS_MAX
from headrace.model.tenant import quotas_of
from headrace.model.topic import TopicSettings


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a broker behaves, whatever reaches it from outside."""

    auto_create_topics: bool = True
    """Make a topic when something is published to it for the first time, or a reader asks for it with `create`."""
    topic: TopicSettings = TopicSettings()
    """The settings of topics where whoever makes them says nothing else."""
    topics_max: int = 10_000
    maintenance_seconds: float = 5.0
    """How often retention is looked after, and written messages are synced that nobody waits for."""
    compact_seconds: float = 60.0
    """How often topics with compact_by_key are compacted, when a segment's worth of messages has come."""
    transaction_seconds_max: float = 3600.0
    """The longest time that a transaction may ask for."""
    transactions_kept_seconds: float = 7 * 86400.0
    """How long the last sequence of a transaction's name is remembered after its last commit."""
    staged_bytes_max: int = 4 << 30
    """How much all open transactions together may have staged, in files; 10 million messages of 100 bytes are 1 GB."""
    journal_bytes: int = 16 << 20
    """The journal is replaced by a snapshot when it is larger, and four times as large as the last one."""
    result_seconds: float = 86400.0
    """How long results of jobs are kept: the retain_seconds of the topic headrace.results when it is created."""

    tenant_quotas: list[str] = []
    """Quotas of tenants other than the default one that have none of their own, as NAME=NUMBER."""
    record_events: bool = False
    """Record events about the bus from the start, in the topic headrace.events; else when the first observer asks."""

    connections_per_identity_max: int = 5_000
    """Sessions of one identity at once, other than the anonymous and the local one."""
    audit: bool = False
    """Record administrative actions, refused attempts and logins also while security is not enabled."""

    def __post_init__(self) -> None:
        if self.topic.middleware:
            raise InvalidArgument("middleware cannot be a default of new topics: give it to one topic")
        if self.topic.view_of is not None:
            raise InvalidArgument("view_of and view_query cannot be defaults of new topics: give them to one topic")
        quotas_of(self.tenant_quotas)  # raises if one is wrong
        for name in ("topics_max", "journal_bytes", "connections_per_identity_max"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} must be more than 0, not {getattr(self, name)}")
        for name in ("maintenance_seconds", "compact_seconds", "transaction_seconds_max", "result_seconds"):
            if not 0 < getattr(self, name) < SECONDS_MAX:  # which NaN is not, either
                raise InvalidArgument(
                    f"{name} must be more than 0 and less than {SECONDS_MAX:.0e} seconds, not {getattr(self, name)}"
                )
        if not 0 <= self.transactions_kept_seconds < SECONDS_MAX:
            raise InvalidArgument(
                f"transactions_kept_seconds must be 0 or more and less than {SECONDS_MAX:.0e} seconds, not "
                f"{self.transactions_kept_seconds}"
            )
