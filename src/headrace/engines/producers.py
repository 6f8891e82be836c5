"""The idempotence table of a partition: recognises batches that producers send again, and their first offsets."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from headrace.model.batch import FLAG_GATHERED, Batch, Producer, decode_origins
from headrace.model.errors import InvalidBatch, OutOfOrderSequence, ProducerFenced, UnknownProducer
from headrace.model.limits import IN_FLIGHT_MAX, PARTITIONS_MAX

logger = logging.getLogger("headrace.broker")

TRANSACTIONS = 1
"""The producer of batches that a transaction committed; ids below 16 are the broker's own."""
PRODUCER_MIN = 16
FORWARDER_MIN = 0xFFFF << 48
"""Producers' ids from here on are those of routes' forwarders: each encodes a partition that messages come from."""
_PARTITION_BITS = 10
FORGOTTEN = -1
"""Instead of the offset of a batch that was appended so long ago that it is forgotten."""
PRODUCERS_MAX = 10_000
"""Producers that a partition remembers; the least recently active one is forgotten first."""


class _Known:
    """A producer: its epoch, the sequence of its last batch, and the offsets of its last batches."""

    __slots__ = ("bases", "epoch", "last")

    def __init__(self, epoch: int, last: int, bases: Iterable[int]) -> None:
        self.epoch = epoch
        self.last = last
        self.bases = deque(bases, IN_FLIGHT_MAX)


Note = tuple[int, _Known | None, int, int | None]
"""How to undo the record of a batch: producer, its entry before, its sequence before, and the offset it evicted."""


class _Saved(msgspec.Struct, array_like=True):
    offset: int
    mark: int
    producers: list[tuple[int, int, int, list[int]]]
    forwarded: dict[int, int] = {}


_decoder = msgspec.msgpack.Decoder(_Saved)


class _SavedOffset(msgspec.Struct, array_like=True):
    offset: int


_offset_decoder = msgspec.msgpack.Decoder(_SavedOffset)


class Producers:
    """The producers of one partition, as of an offset of its log."""

    def __init__(self) -> None:
        self.mark = 0
        """The number of the last batch of a transaction that was appended; commits number them in order."""
        self.forwarded: dict[int, int] = {}
        """By forwarder: all messages before this offset of its source that are for this partition are in it."""
        self._known: dict[int, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def admit(self, producer: Producer) -> int | None:
        """None for the producer's next batch, the first offset of a repeated one; raises for any other."""
        by, epoch, sequence = producer
        known = self._known.get(by)
        if known is None or epoch > known.epoch:
            if sequence:
                raise UnknownProducer(expected_sequence=0)
            return None
        if epoch < known.epoch:
            raise ProducerFenced
        ahead = sequence - known.last
        if ahead == 1:
            return None
        if ahead > 1:
            raise OutOfOrderSequence(
                f"the batch with sequence {known.last + 1} is missing before {sequence}",
                expected_sequence=known.last + 1,
            )
        return known.bases[ahead - 1] if -ahead < len(known.bases) else FORGOTTEN

    def find_repeated(self, producer: Producer) -> int | None:
        """The first offset of a batch that was appended before; None for any other batch."""
        by, epoch, sequence = producer
        known = self._known.get(by)
        if known is None or epoch != known.epoch or sequence > known.last:
            return None
        ahead = sequence - known.last
        return known.bases[ahead - 1] if -ahead < len(known.bases) else FORGOTTEN

    def note(self, producer: Producer, base_offset: int) -> Note:
        """Record a batch that was appended; returns an argument for `take_back`."""
        by, epoch, sequence = producer
        before = self._known.pop(by, None)
        if before is None or before.epoch != epoch:
            note: Note = (by, before, 0, None)
            known = _Known(epoch, sequence, ())
        else:
            known, bases = before, before.bases
            note = (by, before, before.last, bases[0] if len(bases) == IN_FLIGHT_MAX else None)
        known.last = sequence
        known.bases.append(base_offset)
        self._known[by] = known  # at the end: the most recently active
        if len(self._known) > PRODUCERS_MAX:
            del self._known[next(iter(self._known))]
        return note

    def take_back(self, notes: Sequence[Note]) -> None:
        """Undo the last records, as nothing was appended after all."""
        for by, before, last, forgotten in reversed(notes):
            known = self._known.pop(by, None)
            if before is None:
                continue
            if known is before:
                known.last = last
                known.bases.pop()
                if forgotten is not None:
                    known.bases.appendleft(forgotten)
            self._known[by] = before

    def note_batch(self, batch: Batch) -> None:
        """Record a batch that is in the log; one of a commit may be gathered too, of what middleware let through."""
        if batch.producer_id == TRANSACTIONS:
            self.mark = mark_of(batch.producer)
        elif batch.producer_id >= FORWARDER_MIN:
            self.forwarded[batch.producer_id] = mark_of(batch.producer)
        elif batch.producer_id:
            self.note(batch.producer, batch.base_offset)
        if batch.flags & FLAG_GATHERED:
            for place, *producer in _origins(batch):
                self.note(Producer(*producer), batch.base_offset + place)

    def save(self, offset: int) -> bytes:
        """A checkpoint, encoded, of the log before an offset."""
        producers = [(by, known.epoch, known.last, list(known.bases)) for by, known in self._known.items()]
        return msgspec.msgpack.encode(_Saved(offset, self.mark, producers, self.forwarded))

    def load(self, saved: bytes, survived_offset: int) -> int:
        """Load a checkpoint, without batches that the log has lost; returns the offset of the checkpoint."""
        content = _decoder.decode(saved)
        self.mark = content.mark
        self.forwarded = content.forwarded
        for by, epoch, last, bases in content.producers:
            kept = [base for base in bases if base < survived_offset]
            if kept:
                self._known[by] = _Known(epoch, last - (len(bases) - len(kept)), kept)
        return content.offset


def saved_offset(saved: bytes) -> int:
    """The offset of a checkpoint."""
    return _offset_decoder.decode(saved).offset


def mark_of(producer: Producer) -> int:
    """The number of a transaction's batch, or the offset before which a forwarded one was read."""
    return producer.epoch << 32 | producer.sequence


def marked(mark: int) -> Producer:
    """The producer stamp of a transaction's batch with that number."""
    return Producer(TRANSACTIONS, mark >> 32, mark & 0xFFFFFFFF)


def forwarder_id(topic_id: int, partition: int) -> int:
    """The producer id of the forwarder of a partition.

    >>> hex(forwarder_id(3, 1))
    '0xffff000000000c01'
    """
    assert 0 <= partition < PARTITIONS_MAX <= 1 << _PARTITION_BITS
    assert topic_id < 1 << 48 - _PARTITION_BITS
    return FORWARDER_MIN | topic_id << _PARTITION_BITS | partition


def forwarded_by(forwarder: int, end_offset: int) -> Producer:
    """The producer stamp of messages forwarded from before an offset of the source."""
    return Producer(forwarder, end_offset >> 32, end_offset & 0xFFFFFFFF)


def _origins(batch: Batch) -> Sequence[tuple[int, int, int, int]]:
    try:
        if not batch.count:
            body = batch.body()
            return decode_origins(body) if body else ()
        return batch.columns().origins or ()
    except InvalidBatch as error:
        offsets = f"{batch.base_offset} to {batch.next_offset - 1}"
        logger.warning("producers unknown  offsets=%s reason=%s", offsets, error)
        return ()
