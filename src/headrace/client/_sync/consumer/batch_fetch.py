"""Reads batches of a partition with one request, without a subscription."""

from headrace.client._sync.connection.reconnecting import ReconnectingConnection
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
    batches: list[Batch] = []
    view, position = memoryview(body), 0
    while position < len(view):
        batch = parse(view, position)
        try:
            batch.verify()
        except InvalidBatch as error:
            if batches:
                break  # those before it are good; the next fetch begins with it
            # Makes the broker check the batch as well, so that it logs and lists the damage on its disk.
            broker.request(Fetch(topic, partition, batch.base_offset, 1, 0, verify=True))
            where = f"{topic}[{partition}] as it was received"
            raise CorruptBatch(batch.base_offset, batch.next_offset, where, position, str(error)) from error
        batches.append(batch)
        position += batch.length
    return batches
