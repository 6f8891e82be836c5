"""How a producer's messages come into batches: which partition, and when a batch goes."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

from headrace.client._sync.catalogue import Catalogue
from headrace.client._sync.concurrency import Outcome, Timers, now
from headrace.client._sync.line import Line
from headrace.client._sync.shipping import Shipping
from headrace.client.lanes import Lane
from headrace.client.outgoing import AfterAck, BeforePublish, Outgoing, Parcel, WhenSent
from headrace.client.partitioning import Partitioner
from headrace.client.results import Receipt
from headrace.client.serialising import Serializer, serialized, serializer_of, to_bytes
from headrace.client.shapes import Shape, check_partition, codec_of, durability_of
from headrace.client.times import checked_count, checked_seconds
from headrace.model.arguments import check_callable, checked_hooks, checked_timeout, shown
from headrace.model.durability import Durability
from headrace.model.errors import InvalidArgument, MessageTooLarge, PartitionNotFound
from headrace.model.limits import BATCH_COUNT_MAX
from headrace.model.partitioning import by_key

_HURRIED_MAX = 8
"""With so many batches under way to a partition, messages that are in a hurry are gathered until an answer comes."""


class Gathering:
    """The inside of a producer."""

    def __init__(
        self,
        line: Line,
        catalogue: Catalogue,
        timers: Timers,
        *,
        topic: str | None = None,
        linger: float = 0.005,
        batch_bytes: int = 100_000,
        batch_count: int = 1000,
        compression: Literal["none", "lz4", "zstd"] | None = None,
        partitioner: Partitioner | None = None,
        serializer: str | Serializer | None = None,
        durability: Durability | str | None = None,
        buffer_bytes: int = 32 << 20,
        on_full: Literal["block", "raise"] = "block",
        before_publish: Sequence[BeforePublish] = (),
        after_ack: Sequence[AfterAck] = (),
        timeout: float = 30.0,
        on_close: Callable[[Any], None] | None = None,
        bus: object = None,
    ) -> None:
        for name, count in (("batch_bytes", batch_bytes), ("batch_count", batch_count), ("buffer_bytes", buffer_bytes)):
            checked_count(count, name)
        checked_seconds(linger, "linger")
        timeout = checked_timeout(timeout, least=0.001)
        if partitioner is not None:
            check_callable(partitioner, "partitioner")
        before_publish = checked_hooks(before_publish, "before_publish")
        after_ack = checked_hooks(after_ack, "after_ack")
        if on_full not in ("block", "raise"):
            raise InvalidArgument(f"on_full is 'block' or 'raise', not {shown(on_full)}")
        self.topic = topic
        self._bus = bus
        """What must live as long as the producer does."""
        self._catalogue = catalogue
        self._timers = timers
        self._linger = linger
        self._batch_bytes = batch_bytes
        self._batch_count = min(batch_count, BATCH_COUNT_MAX)
        self._codec = codec_of(compression)
        self._partitioner = partitioner or by_key
        self._serializer = serializer_of(serializer)
        self._durability = durability_of(durability)
        self._before_publish = before_publish
        self._timeout = timeout
        self._on_close = on_close
        self._shipping = Shipping(
            line,
            catalogue,
            timers,
            timeout=timeout,
            buffer_bytes=buffer_bytes,
            block=on_full == "block",
            after_ack=after_ack,
            on_room=self._seal,
        )
        self._sticky: dict[str, int] = {}
        self._first_turn = secrets.randbits(32)
        """Producers begin with different partitions, so that those that send little do not all send to the first."""
        self._plain = not self._before_publish and self._serializer is to_bytes
        """Bytes go as they are."""
        self._at_once = self._plain and not linger
        """And do not wait for others."""
        self._begin()

    def _disown(self) -> None:
        """In a forked child: what is gathered is the parent's to deliver."""
        self._shipping.disown()
        self._begin()

    def _begin(self) -> None:
        self._guard = self._shipping.monitor.guard
        self._lingering = False
        self._urgent: list[Lane] = []
        # A batch that takes messages with nothing but a value, as they are, and its lane.
        self._open: Parcel | None = None
        self._open_lane = Lane("", 0, 0)
        self._open_message_bytes_max = 0

    def _put(
        self,
        message: Outgoing,
        callback: WhenSent | None,
        durability: int,
        expected_offset: int | None,
        urgent: bool = False,
    ) -> tuple[Parcel, int]:
        """Put a message into a batch; returns which, and its place in it."""
        if self._before_publish:
            hooked = self._hooked(message)
            if hooked is None:
                return self._dropped(message, callback)
            message = hooked
        value, topic = message.value, message.topic
        if type(value) is not bytes or self._serializer is not to_bytes:
            value = serialized(self._serializer, value)
        shape, deadline = self._catalogue.known(topic), None
        if shape is None:
            deadline = now() + self._timeout
            shape = self._catalogue.get(topic, deadline)
        if expected_offset is not None and (type(expected_offset) is not int or not 0 <= expected_offset < 1 << 63):
            raise InvalidArgument(f"expected_offset is an offset, not {shown(expected_offset)}")
        try:
            return self._place(message, value, shape, callback, durability, expected_offset, urgent, deadline)
        except (MessageTooLarge, PartitionNotFound) as refusal:
            deadline = deadline or now() + self._timeout
            shape = self._catalogue.refreshed(topic, refusal, deadline)
            return self._place(message, value, shape, callback, durability, expected_offset, urgent, deadline)

    def _place(
        self,
        message: Outgoing,
        value: bytes | None,
        shape: Shape,
        callback: WhenSent | None,
        durability: int,
        expected_offset: int | None,
        urgent: bool,
        deadline: float | None,
    ) -> tuple[Parcel, int]:
        """Put a message that is ready into the batch of its partition; returns the batch and its place in it."""
        topic, number = message.topic, message.partition
        if number is None:
            if expected_offset is not None and shape.partitions > 1:
                raise InvalidArgument("expected_offset needs a partition: the topic has several")
            key = message.key
            number = self._turn(topic, shape) if key is None else self._partitioner(key, shape.partitions)
        with self._guard:
            if not self._shipping.open:
                deadline = deadline or now() + self._timeout
                self._shipping.room(deadline)
            lane = self._lane(topic, number, shape)
            parcel = self._gathering(lane, durability, deadline, alone=expected_offset is not None)
            place = parcel.add(message, value, shape.message_bytes_max)
            if callback is not None:
                parcel.callbacks = [*(parcel.callbacks or ()), (place, callback)]
            if urgent or callback is not None:
                parcel.observed += 1
            parcel.expected_offset = expected_offset
            self._placed(lane, parcel, shape, urgent)
        self._shipping.flush()
        return parcel, place

    def _put_value(self, topic: str, value: bytes, durability: int, observed: int) -> tuple[Parcel, int] | None:
        """Put a message that has nothing but a value, and is in a hurry, into a batch: the short way of `_put`.

        None if that cannot be done at once. `observed` is 1 if somebody waits for what becomes of it, or else 0.
        """
        shape = self._catalogue.known(topic)
        if shape is None or len(value) > shape.message_bytes_max:
            return None
        with self._guard:
            if not self._shipping.open:
                return None
            number = self._sticky.get(topic, self._first_turn) % shape.partitions
            lane = self._shipping.lane_at.get((topic, number))
            if lane is None or lane.shape is not shape:
                lane = self._lane(topic, number, shape)
            parcel = lane.gathering
            if parcel is None:
                parcel = lane.gathering = self._begun(durability)
            elif not parcel.plain or parcel.durability != durability:
                return None
            values = parcel.values
            place = len(values)
            values.append(value)
            parcel.bytes += len(value)
            parcel.observed += observed
            full = parcel.bytes >= self._batch_bytes or place + 1 >= self._batch_count
            if full:
                self._seal(lane)
            elif not lane.hurried:
                self._hurry(lane)
        if full:
            self._shipping.flush()
        return parcel, place

    def _placed(self, lane: Lane, parcel: Parcel, shape: Shape, urgent: bool) -> None:
        """A message was put into a parcel: see what is to be done with it."""
        full = parcel.bytes >= self._batch_bytes or len(parcel.values) >= self._batch_count
        if full or parcel.expected_offset is not None:
            self._seal(lane)
        elif urgent or not self._linger:
            self._hurry(lane)
        else:
            self._linger_on()
            simple = self._plain and parcel.plain and lane.topic == self.topic
            if simple and parcel.durability == self._durability:
                self._open, self._open_lane = parcel, lane
                self._open_message_bytes_max = shape.message_bytes_max
        if parcel is self._open and not parcel.plain:
            self._open = None

    def _gathering(self, lane: Lane, durability: int, deadline: float | None, alone: bool) -> Parcel:
        parcel = lane.gathering
        if parcel is not None and (alone or parcel.durability != durability):
            self._seal(lane)
            parcel = None
        if parcel is None:
            parcel = lane.gathering = self._begun(durability, deadline)
        return parcel

    def _begun(self, durability: int, deadline: float | None = None) -> Parcel:
        outcome: Outcome[Receipt] = Outcome()
        return Parcel(outcome, now() + self._timeout if deadline is None else deadline, durability)

    def _seal(self, lane: Lane) -> None:
        """Let a lane's messages go, without waiting for more."""
        parcel = lane.gathering
        if parcel is None or not parcel.values:
            return
        lane.gathering = None
        lane.hurried = False
        if parcel is self._open:
            self._open = None
        self._sticky[lane.topic] = lane.partition + 1
        self._shipping.ship(lane, parcel)

    def _hurry(self, lane: Lane) -> None:
        """Let a lane's messages go as soon as all that are published at the same time are there."""
        if not lane.hurried:
            lane.hurried = True
            self._urgent.append(lane)
            if len(self._urgent) == 1:
                self._shipping.soon(self._hurried)

    def _hurried(self) -> None:
        with self._guard:
            urgent, self._urgent = self._urgent, []
            for lane in urgent:
                # With enough under way it is quicker to wait for the next answer, and for company.
                if lane.under_way < _HURRIED_MAX:
                    self._seal(lane)
        self._shipping.flush()

    def _linger_on(self) -> None:
        """See to it that what has been gathered goes out in time: one timer for all."""
        if not self._lingering:
            self._lingering = True
            self._timers.later(self._linger, self._lingered)

    def _lingered(self) -> None:
        with self._guard:
            self._lingering = False
            begun_before = now() + self._timeout - self._linger / 2
            for lane in self._shipping.lanes():
                if lane.gathering is None:
                    continue
                if lane.gathering.deadline > begun_before:
                    self._linger_on()
                elif lane.under_way < _HURRIED_MAX:
                    self._seal(lane)
                else:
                    lane.hurried = True
        self._shipping.flush()

    # Where to.

    def _topic(self, topic: str | None) -> str:
        name = self.topic if topic is None else topic
        if name is None:
            raise InvalidArgument("this producer has no topic of its own: say which one the message is for")
        return name

    def _turn(self, topic: str, shape: Shape) -> int:
        """The partition whose turn it is to get messages without a key."""
        return self._sticky.get(topic, self._first_turn) % shape.partitions

    def _lane(self, topic: str, partition: int, shape: Shape) -> Lane:
        check_partition(topic, partition, shape)
        lane = self._shipping.lane(topic, partition)
        lane.shape = shape
        lane.codec = shape.codec if self._codec is None else self._codec
        return lane

    def _hooked(self, message: Outgoing) -> Outgoing | None:
        for hook in self._before_publish:
            changed = hook(message)
            if changed is None:
                return None
            if not isinstance(changed, Outgoing):
                raise InvalidArgument(f"a before_publish hook returns a message or None, not {shown(changed)}")
            message = changed
        return message

    def _dropped(self, message: Outgoing, callback: WhenSent | None) -> tuple[Parcel, int]:
        receipt = Receipt(message.topic, -1, -1, 0)
        parcel = self._begun(0)
        parcel.outcome.settle(receipt)
        if callback is not None:
            callback(receipt, None)
        return parcel, 0
