"""Transactions: messages for several topics and the offsets of a group, all or nothing, in one request."""

from typing import Annotated

import msgspec

from headrace.gateways.http.call import Call, Reply, count_partitions, json_reply
from headrace.gateways.http.route import Route
from headrace.gateways.http.topic_resources import OffsetFields
from headrace.model.batch import encode
from headrace.model.envelope import MessageEnvelope, StoredFields, envelope_key
from headrace.model.errors import HeadraceError
from headrace.model.limits import LEASE_MESSAGES_MAX
from headrace.model.partitioning import by_key
from headrace.model.requests import (
    PartitionOffset,
    TransactionAbort,
    TransactionBegin,
    TransactionBegun,
    TransactionCommit,
    TransactionCommitted,
    TransactionStage,
)

TRANSACTIONS = "transactions"


class TransactionMessage(MessageEnvelope, forbid_unknown_fields=True, kw_only=True):
    """A message of a transaction."""

    topic: str


class TransactionFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What to commit."""

    transaction: str
    """A name; the sequence numbers its transactions."""
    sequence: Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))] | None = None
    """A transaction of this name and number that was committed before is not repeated. null: the next."""
    messages: Annotated[list[TransactionMessage], msgspec.Meta(max_length=LEASE_MESSAGES_MAX)] = []
    group: str = ""
    """Commit offsets of this group."""
    offsets: list[OffsetFields] = []
    """Those of the next messages to read."""


_decoder = msgspec.json.Decoder(TransactionFields)


async def commit_transaction(call: Call) -> Reply:
    """Commit a transaction; one that was committed before is recognised."""
    given = await call.decoded(_decoder)
    batches = _gathered(call, given.messages)
    begun = await call.ask(TransactionBegin(given.transaction, given.sequence))
    if begun.committed:
        return json_reply(TransactionCommitted(begun.sequence, repeated=True))
    try:
        committed = await _commit(call, given, batches, begun)
    except HeadraceError:
        await _abort(call, given.transaction, begun.epoch)
        raise
    return json_reply(committed)


def _gathered(call: Call, messages: list[TransactionMessage]) -> dict[tuple[str, int], StoredFields]:
    """The messages by topic and partition."""
    gathered: dict[tuple[str, int], StoredFields] = {}
    for message in messages:
        key, partition = envelope_key(message), message.partition
        if partition is None:
            partition = by_key(key, count_partitions(call, message.topic)) if key else 0
        gathered.setdefault((message.topic, partition), StoredFields()).add(message, key)
    return gathered


async def _commit(
    call: Call,
    given: TransactionFields,
    batches: dict[tuple[str, int], StoredFields],
    begun: TransactionBegun,
) -> TransactionCommitted:
    for (topic, partition), fields in batches.items():
        now_us = call.gateway.now_us()
        data = encode(fields.columns(now_us), now_us).data
        await call.ask(TransactionStage(given.transaction, begun.epoch, topic, partition), memoryview(data))
    places = [PartitionOffset(one.topic, one.partition, one.offset) for one in given.offsets]
    return await call.ask(TransactionCommit(given.transaction, begun.epoch, None, given.group, "", places))


async def _abort(call: Call, transaction: str, epoch: int) -> None:
    try:
        await call.ask(TransactionAbort(transaction, epoch))
    except HeadraceError:
        return  # it is over already, or times out: the first error is the one to tell


TRANSACTION_ROUTES = [
    Route(
        "POST", "/v1/transactions", commit_transaction,
        "Publish to several topics and commit offsets of a group, all or nothing", TRANSACTIONS,
        body=TransactionFields, body_required=True, answer=TransactionCommitted,
        errors=(
            "topic_not_found", "partition_not_found", "transaction_fenced", "transaction_not_found", "group_in_use",
            "message_too_large",
        ),
        example={
            "transaction": "billing", "sequence": 17,
            "messages": [{"topic": "bills", "value": {"id": 1}}, {"topic": "audit", "value": {"bill": 1}}],
            "group": "billing", "offsets": [{"topic": "orders", "partition": 0, "offset": 18}],
        },
    ),
]  # fmt: skip
"""The route of transactions."""
