"""How many partitions a topic has: what a publisher needs to know, and nothing that would take longer to find out."""

from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, declare


class PartitionsCounted(Answer):
    """The answer to PartitionCount."""

    partitions: int
    topic_id: int
    """A topic that is deleted and created again gets another."""


@declare(Kind.PARTITION_COUNT, Permission(Verb.PUBLISH, Resource.TOPIC, "topic"), awaits_commit=False)
class PartitionCount(Request[PartitionsCounted]):
    """Count the partitions of a topic; it is created if it does not exist and auto_create_topics is on."""

    topic: str
