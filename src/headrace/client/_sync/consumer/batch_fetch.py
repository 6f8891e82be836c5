"""Reads batches of a partition with one request, without a subscription."""

from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client.connection.request_router import Bytes
from headrace.model.arguments import checked_timeout
from headrace.model.batch import Batch, parse
from headrace.model.errors import CorruptBatch, InvalidBatch
from headrace.model.reading import Fetch


def fetch_batches(
    broker: ReconnectingConnection, topic: str, partition: int, offset: int, bytes_max: int, wait: float
) -> list[Batch]:
    """Fetch batches from an offset on; waits for so many seconds if there are none yet."""
    wait = checked_timeout(wait, "wait")
    head = Fetch(topic, partition, offset, bytes_max, round(wait * 1000))
    _, body = broker.request_with_body(head, timeout=broker.timeout + wait)
    try:
        return _batches_in(head, body)
    except CorruptBatch as error:
        # The broker checks the batch, too: it records and tells what is damaged on its disk. A node of a cluster has
        # its copy repaired, and this is repeated until one serves. What the broker takes for good is read once more.
        head = Fetch(topic, partition, error.first_offset, bytes_max, 0, verify=True)
        _, body = broker.request_with_body(head)
        return _batches_in(head, body)


def _batches_in(head: Fetch, body: Bytes) -> list[Batch]:
    """The batches that were read, up to one that is damaged; raises CorruptBatch if that is the first."""
    batches: list[Batch] = []
    view, position = memoryview(body), 0
    while position < len(view):
        batch = parse(view, position)
        try:
            batch.verify()
        except InvalidBatch as error:
            if batches:
                break  # those before it are good; the next fetch begins with it
            where = f"{head.topic}[{head.partition}] as it was received"
            raise CorruptBatch(batch.base_offset, batch.next_offset, where, position, str(error)) from error
        batches.append(batch)
        position += batch.length
    return batches
