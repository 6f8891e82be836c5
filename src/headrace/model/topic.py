"""Topics: their names, and every setting one can have."""

import re
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from headrace.model.arguments import shortened, shown
from headrace.model.codec import Codec
from headrace.model.content.query import ContentQuery
from headrace.model.durability import Durability
from headrace.model.errors import InvalidArgument
from headrace.model.limits import (
    BATCH_BYTES_MAX,
    GROUP_NAME_CHARS_MAX,
    MESSAGE_BYTES_MAX,
    MIDDLEWARE_BYTES_MAX,
    MIDDLEWARE_MAX,
    PARTITIONS_MAX,
    PLAIN_NAME_CHARS_MAX,
    SECONDS_MAX,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    TENANT_NAME_CHARS_MAX,
    TOPIC_NAME_CHARS_MAX,
)
from headrace.model.names import checked_characters
from headrace.model.type_info import build_type_info

DEFAULT_TENANT = "default"
SYSTEM_PREFIX = "headrace."
"""Topics of this name belong to Headrace: they hold the state of pipelines and of the archive."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MEMORY_BYTES_MIN = 2 * BATCH_BYTES_MAX


class TopicName(NamedTuple):
    """A topic's full name. Written `tenant/topic`, or only `topic` in the default tenant."""

    tenant: str
    topic: str

    def __str__(self) -> str:
        return self.topic if self.tenant == DEFAULT_TENANT else f"{self.tenant}/{self.topic}"


def parse_topic(text: str) -> TopicName:
    """The name that a text stands for.

    >>> parse_topic("orders")
    TopicName(tenant='default', topic='orders')
    >>> str(parse_topic("acme/orders"))
    'acme/orders'
    """
    tenant, slash, topic = text.rpartition("/")
    if not slash:
        tenant = DEFAULT_TENANT
    return TopicName(
        _checked(tenant, "tenant", TENANT_NAME_CHARS_MAX, text),
        checked_characters(topic, "topic", TOPIC_NAME_CHARS_MAX),
    )


def tenant_of(name: str) -> str:
    """The tenant that a name belongs to.

    >>> tenant_of("acme/billing"), tenant_of("billing")
    ('acme', 'default')
    """
    return name.rpartition("/")[0] or DEFAULT_TENANT


def checked_group(name: str) -> str:
    """The name, if it may be a group's, without the default tenant."""
    return checked_tenant_name(name, "group")


def checked_tenant_name(name: str, what: str) -> str:
    """The name, if it may be that of a `what`, which like a topic's may begin with a tenant and a slash."""
    tenant, slash, bare = name.rpartition("/")
    if slash:
        _checked(tenant, "tenant", TENANT_NAME_CHARS_MAX, name)
    checked_characters(bare, what, GROUP_NAME_CHARS_MAX)
    return bare if tenant == DEFAULT_TENANT else name


def checked_tenant(name: str) -> str:
    """The name, if it may be a tenant's."""
    return _checked(name, "tenant", TENANT_NAME_CHARS_MAX, name)


def checked_name(name: str, what: str) -> str:
    """The name, if it may be that of a `what`, which belongs to a topic."""
    return checked_characters(name, what, GROUP_NAME_CHARS_MAX)


def checked_plain_name(name: str, what: str) -> str:
    """The name, if it may be that of a `what` whose name is also a part of paths and of other names."""
    return _checked(name, what, PLAIN_NAME_CHARS_MAX, name)


def _checked(name: str, what: str, chars_max: int, whole: str) -> str:
    if len(name) > chars_max or not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{shown(whole)} cannot name a {what}: use 1 to {chars_max} letters, digits, '.', '_' and '-', beginning "
            "with a letter or digit"
        )
    return name


class Storage(Enum):
    """Where a topic's messages live."""

    DISK = "disk"
    MEMORY = "memory"
    """Gone when the broker stops; the oldest are dropped when memory_bytes are full."""
    SPILL = "spill"
    """In memory, and on the disk what does not fit there; gone when the broker stops."""


class Validity(Enum):
    """How long a topic's messages are valid."""

    KEEP = "keep"
    """Until retention by age or size removes them."""
    UNTIL_CONSUMED = "until_consumed"
    """Until every subscription has passed them."""
    TTL = "ttl"
    """For a time, after which they are not delivered any more."""


class Compression(Enum):
    """How a topic's batches are compressed."""

    PRODUCER = "producer"
    """As each producer chooses."""
    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"

    @property
    def codec(self) -> Codec:
        """What it means for a batch that nobody has chosen for."""
        return {"lz4": Codec.LZ4, "zstd": Codec.ZSTD}.get(self.value, Codec.NONE)


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a topic. `docs/reference/topics.md` explains them with examples."""

    partitions: int = 1
    """Messages with the same key go to the same one. There can be more later, never less."""
    storage: Storage = Storage.DISK
    """`disk`; `memory`: bounded, and gone when the broker stops; `spill`: what leaves memory goes to disk."""
    validity: Validity = Validity.KEEP
    """`keep`, `until_consumed` or `ttl`."""
    retain_seconds: float | None = None
    """Remove segments whose newest message was appended longer ago."""
    retain_bytes: int | None = None
    """Remove a partition's oldest segments while it is larger; those that routes have yet to forward stay.

    So a source grows beyond this while a target takes no messages; `headrace route list` shows why.
    """
    ttl_seconds: float | None = None
    """With validity `ttl`: how long after it was appended a message is delivered."""
    segment_bytes: int | None = None
    """Size of a partition's files; by default 512 MiB, or an eighth of retain_bytes."""
    segment_seconds: float | None = None
    """Start a new file after so long; by default an eighth of retain_seconds or ttl_seconds."""
    compact_by_key: bool = False
    """Keep only the last message of each key, in all but the newest segment; a value of None removes the key."""
    message_bytes_max: int = 1 << 20
    """The largest message: value, key and headers."""
    durability: Durability = Durability.SYNCED
    """What every acknowledgement means at least, and what a message must have reached before anyone reads it.

    In a cluster `replicated` by default.
    """
    compression: Compression = Compression.PRODUCER
    """`producer`: as it comes; else what clients use for this topic: `none`, `lz4` or `zstd`."""
    memory_bytes: int = 256 << 20
    """With storage `memory` or `spill`: how much of a partition is in memory."""
    key_versions: bool = False
    """Number the messages of each key 0, 1, 2, …, for `expected_version` and `history`; retention is not possible."""
    middleware: tuple[dict[str, Any], ...] = ()
    """What messages pass through when they are published and delivered, in order: a `name` and its options each."""
    middleware_seconds: float = 5.0
    """How long middleware that runs on a thread may take for a batch; the batch is refused then."""
    view_of: str | None = None
    """Make a virtual topic (view) of this topic: it stores nothing, and has the messages that view_query selects."""
    view_query: ContentQuery | None = None
    """Of a virtual topic: one of `exact`, `partial`, `regex` and `jsonpath`, which a message's value has to match."""

    def __post_init__(self) -> None:
        _bounded("partitions", self.partitions, 1, PARTITIONS_MAX)
        _bounded("message_bytes_max", self.message_bytes_max, 1, MESSAGE_BYTES_MAX)
        _bounded("memory_bytes", self.memory_bytes, _MEMORY_BYTES_MIN, 1 << 50)
        if self.segment_bytes is not None:
            _bounded("segment_bytes", self.segment_bytes, SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)
        if self.retain_bytes is not None:
            _bounded("retain_bytes", self.retain_bytes, 1, 1 << 60)
        if self.middleware:
            _check_middleware(self.middleware)
        for name in ("retain_seconds", "ttl_seconds", "segment_seconds", "middleware_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < SECONDS_MAX:
                raise InvalidArgument(f"{name} must be more than 0 and less than {SECONDS_MAX:.0e}, not {seconds}")
        if (self.validity is Validity.TTL) != (self.ttl_seconds is not None):
            raise InvalidArgument("validity ttl and ttl_seconds go together: give both or neither")
        if self.storage is not Storage.DISK and self.durability is not Durability.MEMORY:
            raise InvalidArgument("a topic in memory has durability memory: it cannot be written or synced")
        if self.compact_by_key and self.validity is not Validity.KEEP:
            raise InvalidArgument("compact_by_key needs validity keep")
        if (self.view_of is None) != (self.view_query is None):
            raise InvalidArgument("view_of and view_query go together: give both for a virtual topic, or neither")
        if self.view_of is not None:
            parse_topic(self.view_of)
        if self.key_versions:
            self._check_key_versions()

    def _check_key_versions(self) -> None:
        """Refuse settings under which the messages of a key could not be counted exactly."""
        for name in ("retain_seconds", "retain_bytes"):
            if getattr(self, name) is not None:
                raise InvalidArgument(
                    f"key_versions and {name} exclude each other: retention removes messages that versions count; "
                    f"leave out {name}, or use compact_by_key, which keeps the last message of each key"
                )
        if self.validity is not Validity.KEEP:
            raise InvalidArgument("key_versions needs validity keep: versions count all messages of a key")
        if self.storage is Storage.DISK and self.durability < Durability.SYNCED:
            raise InvalidArgument(
                "key_versions needs durability synced or replicated: else a power loss could give a version to two "
                "messages"
            )

    def as_dict(self) -> dict[str, Any]:
        """The settings by name, in plain values."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        content["durability"] = self.durability.name.lower()
        content["middleware"] = list(content["middleware"])
        if self.view_of is None:  # so an earlier Headrace can read the settings of all other topics
            del content["view_of"], content["view_query"]
        return content


build_type_info(TopicSettings)


def topic_settings(given: dict[str, Any], base: TopicSettings | None = None) -> TopicSettings:
    """Settings from plain values by name, over those of `base`; says which one is wrong.

    >>> topic_settings({"partitions": 4, "durability": "written"}).partitions
    4
    """
    plain = dict(given)
    if plain.get("storage") in ("memory", "spill"):
        plain.setdefault("durability", "memory")
    merged = {**(base or TopicSettings()).as_dict(), **plain}
    durability = str(merged["durability"]).upper()
    if durability not in Durability.__members__:
        raise InvalidArgument(f"durability is memory, written, synced or replicated, not {shown(merged['durability'])}")
    merged["durability"] = Durability[durability].value
    try:
        return msgspec.convert(merged, TopicSettings)
    except (msgspec.ValidationError, UnicodeError) as error:
        cause = error.__cause__
        raise InvalidArgument(f"a topic's settings are wrong: {shortened(cause or error)}") from error


def _bounded(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidArgument(f"{name} must be {least} to {most}, not {value}")


def _check_middleware(entries: tuple[dict[str, Any], ...]) -> None:
    """Refuse a list of middleware that is too long, or whose entries have no name."""
    if len(entries) > MIDDLEWARE_MAX:
        raise InvalidArgument(f"a topic has at most {MIDDLEWARE_MAX} middleware, not {len(entries)}")
    for entry in entries:
        name = entry.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= PLAIN_NAME_CHARS_MAX:
            raise InvalidArgument(
                'each entry of middleware is an object with a name and options, such as {"name": "compress", '
                f'"codec": "zstd"}}, not {shown(entry)}'
            )
    size = len(msgspec.json.encode(entries))
    if size > MIDDLEWARE_BYTES_MAX:
        raise InvalidArgument(f"middleware has at most {MIDDLEWARE_BYTES_MAX} bytes as JSON, not {size}")
