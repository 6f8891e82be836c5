"""What a producer must know about a topic."""

from typing import NamedTuple

from headrace.model.arguments import shown
from headrace.model.codec import Codec
from headrace.model.durability import Durability
from headrace.model.errors import InvalidArgument, PartitionNotFound
from headrace.model.key_versions import VERSION_MAX
from headrace.model.requests import TopicInfo
from headrace.model.topic import Compression, Storage, topic_settings


class TopicMetadata(NamedTuple):
    """What a producer must know about a topic."""

    partitions: int
    codec: Codec
    message_bytes_max: int
    durability: Durability = Durability.SYNCED
    """What messages of a transaction have when they can be read."""


def metadata_of(info: TopicInfo) -> TopicMetadata:
    """Extract the metadata from the broker's description of a topic."""
    settings = topic_settings(info.settings)
    durability = max(settings.durability, Durability.SYNCED) if settings.storage is Storage.DISK else Durability.MEMORY
    return TopicMetadata(settings.partitions, settings.compression.codec, settings.message_bytes_max, durability)


def check_partition(topic: str, number: int, metadata: TopicMetadata) -> None:
    """Refuse a partition that the topic does not have, as far as is known."""
    if type(number) is not int or not 0 <= number < metadata.partitions:
        raise PartitionNotFound(f"{topic} has partitions 0 to {metadata.partitions - 1}, not {shown(number)}")


class ExpectedPlace(NamedTuple):
    """What a publisher expects of the place that its messages get; the broker refuses them otherwise."""

    offset: int | None = None
    version: int | None = None
    """How many messages their key has."""


def expected_place(offset: int | None, version: int | None, key: bytes | None) -> ExpectedPlace | None:
    """Check what is expected; None if nothing is."""
    if offset is None and version is None:
        return None
    if offset is not None and (type(offset) is not int or not 0 <= offset < 1 << 63):
        raise InvalidArgument(f"expected_offset is an offset, not {shown(offset)}")
    if version is not None:
        check_expected_version(version)
        if key is None:
            raise InvalidArgument("expected_version is about a key: give one")
    return ExpectedPlace(offset, version)


def may_create(expected: ExpectedPlace | None) -> bool:
    """Whether a topic may be created for messages: one that is created so counts no versions, and refuses them."""
    return expected is None or expected.version is None


def expected_batch(version: int | None) -> ExpectedPlace | None:
    """What is expected of a batch whose messages have one key."""
    if version is None:
        return None
    check_expected_version(version)
    return ExpectedPlace(version=version)


def check_expected_version(version: object) -> None:
    """Refuse what cannot be a version."""
    if type(version) is not int or not 0 <= version <= VERSION_MAX:
        raise InvalidArgument(f"expected_version is how many messages the key has, 0 or more, not {shown(version)}")


def codec_of(compression: str | None) -> Codec | None:
    """The codec of that name; None leaves it to the topic."""
    if compression is None:
        return None
    if compression not in ("none", "lz4", "zstd"):
        raise InvalidArgument(f"compression is 'none', 'lz4' or 'zstd', not {shown(compression)}")
    return Compression(compression).codec


def durability_of(given: Durability | str | None) -> int:
    """The least durability that is asked for; None leaves it to the topic."""
    if given is None:
        return 0
    if isinstance(given, str):
        if given.upper() not in Durability.__members__:
            raise InvalidArgument(f"durability is 'memory', 'written', 'synced' or 'replicated', not {shown(given)}")
        return Durability[given.upper()].value
    if not isinstance(given, Durability):
        raise InvalidArgument(f"durability is 'memory', 'written', 'synced' or 'replicated', not {shown(given)}")
    return given.value
