"""The settings of a producer, checked once."""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.client.producer.partitioning import Partitioner
from headrace.client.producer.pending_batch import AfterAck, BeforePublish
from headrace.client.producer.serializing import Serializer, serializer_of
from headrace.client.producer.topic_metadata import codec_of, durability_of
from headrace.client.times import checked_count, checked_seconds
from headrace.model.arguments import check_callable, checked_hooks, checked_timeout, shown
from headrace.model.codec import Codec
from headrace.model.durability import Durability
from headrace.model.errors import InvalidArgument
from headrace.model.limits import BATCH_COUNT_MAX
from headrace.model.partitioning import by_key


class ProducerSettings(NamedTuple):
    """How a producer batches, encodes and sends messages; `Bus.producer` documents each setting."""

    topic: str | None
    linger: float
    batch_bytes: int
    batch_count: int
    codec: Codec | None
    """None: each topic's own codec."""
    partitioner: Partitioner
    serializer: Serializer
    durability: int
    buffer_bytes: int
    block: bool
    """Whether publishing waits for room in a full buffer; otherwise it raises Busy."""
    before_publish: tuple[BeforePublish, ...]
    after_ack: tuple[AfterAck, ...]
    timeout: float


def producer_settings(
    *,
    topic: str | None,
    linger: float,
    batch_bytes: int,
    batch_count: int,
    compression: str | None,
    partitioner: Partitioner | None,
    serializer: str | Serializer | None,
    durability: Durability | str | None,
    buffer_bytes: int,
    on_full: str,
    before_publish: Sequence[BeforePublish],
    after_ack: Sequence[AfterAck],
    timeout: float,
) -> ProducerSettings:
    """Check the settings as a caller gives them; raises InvalidArgument."""
    if partitioner is not None:
        check_callable(partitioner, "partitioner")
    if on_full not in ("block", "raise"):
        raise InvalidArgument(f"on_full is 'block' or 'raise', not {shown(on_full)}")
    return ProducerSettings(
        topic,
        checked_seconds(linger, "linger"),
        checked_count(batch_bytes, "batch_bytes"),
        min(checked_count(batch_count, "batch_count"), BATCH_COUNT_MAX),
        codec_of(compression),
        partitioner or by_key,
        serializer_of(serializer),
        durability_of(durability),
        checked_count(buffer_bytes, "buffer_bytes"),
        on_full == "block",
        tuple(checked_hooks(before_publish, "before_publish")),
        tuple(checked_hooks(after_ack, "after_ack")),
        checked_timeout(timeout, least=0.001),
    )
