"""Multicast: publishes one message to several topics at once, in a transaction of the bus's own."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.client._sync.concurrency import Guard, now
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client._sync.producer.metadata_cache import MetadataCache
from headrace.client._sync.producer.transaction import Transaction
from headrace.client.connection import fork_guard
from headrace.client.producer.pending_batch import checked_key
from headrace.client.producer.topic_metadata import TopicMetadata
from headrace.client.results import Receipt
from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument, Timeout, TransactionNotFound
from headrace.model.limits import MULTICAST_TOPICS_MAX
from headrace.model.partitioning import by_key
from headrace.model.requests import TransactionCommitted

_NAME = "headrace.multicast."
_UNKNOWN_OFFSET = -1
"""Instead of the offset, when the answer to the first commit was lost, or the message could not be appended yet."""


class Multicast:
    """Publishes to several topics; publishes that run at the same time use transactions of different names."""

    def __init__(self, broker: ReconnectingConnection, metadata_cache: MetadataCache, tenant: str, bus: object) -> None:
        self._broker = broker
        self._metadata_cache = metadata_cache
        self._tenant = tenant
        self._bus = bus
        self._guard = Guard()
        self._free: list[tuple[str, int]] = []
        """Names of transactions that nobody uses now, each with its next sequence."""
        self._turn = 0
        self._forks = fork_guard.count

    def publish(
        self, topics: Sequence[str], value: bytes | None, key: bytes | str | None, timeout: float, fields: Any
    ) -> list[Receipt]:
        """Publish a message to all of the topics, or to none; returns a receipt for each, in their order."""
        names = self._checked_topics(topics)
        name, sequence = self._take()
        deadline = now() + timeout
        receipts: dict[str, Receipt] = {}
        while True:
            transaction = Transaction(self._broker, self._metadata_cache, name, sequence, timeout, self._bus)
            try:
                with transaction:
                    for topic in names:
                        before = receipts.get(topic)
                        number = fields.get("partition") if before is None else before.partition
                        receipts[topic] = self._stage(transaction, topic, value, key, {**fields, "partition": number})
                break
            except TransactionNotFound:  # the broker restarted: with the same sequence, a committed one is recognised
                if now() >= deadline:
                    raise Timeout(
                        f"the message was not committed in {timeout:g} s, as the broker lost its transaction again and "
                        "again; publish it again"
                    ) from None
        with self._guard:
            self._turn += 1
            self._free.append((name, sequence + 1))
        return self._located(transaction.outcome, list(receipts.values()))

    def _stage(
        self, transaction: Transaction, topic: str, value: bytes | None, key: bytes | str | None, fields: Any
    ) -> Receipt:
        """Publish the message to one of the topics with the commit; the offset is known afterwards."""
        metadata = transaction.metadata(topic)
        number = self._partition(metadata, fields["partition"], checked_key(key))
        transaction.publish(topic, value, key=key, **{**fields, "partition": number})
        return Receipt(topic, number, _UNKNOWN_OFFSET, 1, metadata.durability)

    def _located(self, outcome: TransactionCommitted | None, receipts: list[Receipt]) -> list[Receipt]:
        """The receipts with the offsets that the commit told; None: it was found to have happened before."""
        places = [] if outcome is None else outcome.places
        offsets = {self._full_name(place.topic): place.offset for place in places}
        repeated = outcome is None or outcome.repeated
        return [
            msgspec.structs.replace(one, offset=offsets.get(self._full_name(one.topic), one.offset), duplicate=repeated)
            for one in receipts
        ]

    def _partition(self, metadata: TopicMetadata, given: int | None, key: bytes | None) -> int:
        if given is not None:
            return given
        return self._turn % metadata.partitions if key is None else by_key(key, metadata.partitions)

    def _take(self) -> tuple[str, int]:
        """A name that no other publish uses at the same time, here or in another process."""
        with self._guard:
            if self._forks != fork_guard.count:
                self._forks, self._free = fork_guard.count, []
            return self._free.pop() if self._free else (_NAME + secrets.token_hex(8), 0)

    def _checked_topics(self, topics: Sequence[str]) -> list[str]:
        names = list(topics)
        if not 0 < len(names) <= MULTICAST_TOPICS_MAX:
            raise InvalidArgument(f"a message is published to 1 to {MULTICAST_TOPICS_MAX} topics, not {len(names)}")
        for name in names:
            if not isinstance(name, str):
                raise InvalidArgument(f"a topic is named by text, not {shown(name)}")
        if len({self._full_name(name) for name in names}) < len(names):
            raise InvalidArgument("a topic is named twice: name each once")
        return names

    def _full_name(self, topic: str) -> str:
        return topic if "/" in topic else f"{self._tenant}/{topic}"
