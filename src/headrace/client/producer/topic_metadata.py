"""What a producer must know about a topic."""

from typing import NamedTuple

from headrace.model.arguments import shown
from headrace.model.codec import Codec
from headrace.model.durability import Durability
from headrace.model.errors import InvalidArgument, PartitionNotFound
from headrace.model.requests import TopicInfo
from headrace.model.topic import Compression, topic_settings


class TopicMetadata(NamedTuple):
    """What a producer must know about a topic."""

    partitions: int
    codec: Codec
    message_bytes_max: int


def metadata_of(info: TopicInfo) -> TopicMetadata:
    """Extract the metadata from the broker's description of a topic."""
    settings = topic_settings(info.settings)
    return TopicMetadata(settings.partitions, settings.compression.codec, settings.message_bytes_max)


def check_partition(topic: str, number: int, metadata: TopicMetadata) -> None:
    """Refuse a partition that the topic does not have, as far as is known."""
    if type(number) is not int or not 0 <= number < metadata.partitions:
        raise PartitionNotFound(f"{topic} has partitions 0 to {metadata.partitions - 1}, not {shown(number)}")


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
            raise InvalidArgument(f"durability is 'memory', 'written' or 'synced', not {shown(given)}")
        return Durability[given.upper()].value
    if not isinstance(given, Durability):
        raise InvalidArgument(f"durability is 'memory', 'written' or 'synced', not {shown(given)}")
    return given.value
