"""What an accumulator holds for one partition."""

from headrace.client.producer.partition_sender import PartitionSender
from headrace.client.producer.pending_batch import PendingBatch
from headrace.client.producer.topic_metadata import TopicMetadata


class PartitionBuffer:
    """The open batch of one partition, to which messages are added, and the sender that gets it afterwards."""

    __slots__ = ("metadata", "open_batch", "partition_sender")

    def __init__(self, partition_sender: PartitionSender, metadata: TopicMetadata) -> None:
        self.partition_sender = partition_sender
        self.metadata = metadata
        """What was known of the topic when the partition was last used."""
        self.open_batch: PendingBatch | None = None

    def take_batch(self) -> PendingBatch | None:
        """Give up the open batch; None if it has no messages."""
        batch = self.open_batch
        if batch is None or not batch.values:
            return None
        self.open_batch = None
        self.partition_sender.refill_wanted = False
        return batch
