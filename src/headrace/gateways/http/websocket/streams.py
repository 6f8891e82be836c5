"""A stream of a topic over a WebSocket: all partitions, as far as the client's credit reaches."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.streams import Stream
from headrace.gateways.http.event_position import position_text
from headrace.gateways.http.event_stream import linger
from headrace.gateways.http.problems import problem_of
from headrace.gateways.http.reading import stored_batches
from headrace.gateways.http.websocket.frames import Item
from headrace.model.errors import CorruptBatch, HeadraceError
from headrace.model.reading import StreamOpen
from headrace.model.requests import TopicDescribe

if TYPE_CHECKING:
    from headrace.gateways.http.websocket.connection import SocketConnection

_PORTION_BYTES = 64 << 10
"""Read at a time; a batch that is larger is read whole."""
_DELIVERY_MESSAGES = 500
_DELIVERY_BYTES = 64 << 10
"""A delivery has no more messages once it has so many bytes."""
_CREDIT_BYTES = 1 << 60
_BEATS = 3
_EMPTY = memoryview(bytearray())


class SocketStream:
    """Sends the messages of all partitions of a topic; each has the position behind it as its id."""

    def __init__(
        self, connection: "SocketConnection", number: int, topic: str, position: dict[int, int], credit: int
    ) -> None:
        self._connection = connection
        self._number = number
        self._topic = topic
        self._position = position
        self._credit = credit
        self._streams: dict[int, Stream] = {}
        """By partition."""
        self._ready: deque[int] = deque()
        """Partitions that may have messages, the one that waits longest first."""
        self._read: deque[tuple[int, int, Item | None]] = deque()
        """Messages that were read and not sent: partition, offset, message. Without one: go on at the offset."""
        self._event = asyncio.Event()
        self._topic_id = 0
        self._damage: tuple[int, CorruptBatch] | None = None
        """What ends the stream when all that was read before it is sent, and its partition."""
        self._is_open = True

    async def open(self) -> None:
        """Open the streams of all partitions; raises if one has no such offset."""
        for partition, offset in list(self._position.items()):
            await self._open(partition, offset)

    def grant(self, messages: int) -> None:
        """So many messages more may be sent."""
        self._credit += messages
        self.wake()

    def wake(self) -> None:
        """Look again for something to send."""
        self._event.set()

    def close(self) -> None:
        """Send nothing more."""
        self._is_open = False
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._event.set()

    async def run(self, ended: Callable[[], object]) -> None:
        """Send messages as they come, until the stream is closed or something is wrong."""
        connection = self._connection
        connection.gateway.streams += 1
        connection.on_lost.add(self.close)
        try:
            while self._is_open:
                if not self._can_send:
                    await self._wait()
                elif self._read:
                    self._send_some()
                    await asyncio.sleep(0)
                elif self._damage is not None:
                    partition, damage = self._damage
                    self._position[partition] = max(self._position[partition], damage.next_offset)
                    raise damage
                else:
                    self._read_some(self._ready.popleft())
        except HeadraceError as error:
            fields: dict[str, Any] = {"stream": self._number, "problem": problem_of(error)}
            if self._damage is not None:
                fields["position"] = position_text(self._position)  # behind the damage: where to open another stream
            connection.send({"push": "StreamEnd", "fields": fields})
        finally:
            connection.gateway.streams -= 1
            connection.on_lost.discard(self.close)
            self.close()
            ended()

    @property
    def _can_send(self) -> bool:
        return self._credit > 0 and not self._connection.paused and bool(self._read or self._ready or self._damage)

    async def _open(self, partition: int, offset: int) -> None:
        self._connection.stream_number += 1
        request = StreamOpen(self._topic, partition, offset, _CREDIT_BYTES, self._connection.stream_number)
        stream = self._connection.ask(request, _EMPTY)
        if isinstance(stream, PendingAnswer):
            stream = await self._connection.answered(stream)
        assert isinstance(stream, Stream)
        self._streams[partition] = stream
        self._topic_id = stream.answer.topic_id
        self._position[partition] = offset
        stream.start(partial(self._be_ready, partition))
        self._be_ready(partition)

    def _be_ready(self, partition: int) -> None:
        if partition not in self._ready:
            self._ready.append(partition)
        self._event.set()

    async def _wait(self) -> None:
        gateway = self._connection.gateway
        self._event.clear()
        try:
            await asyncio.wait_for(self._event.wait(), gateway.settings.heartbeat_ms * _BEATS / 1000)
        except TimeoutError:
            await self._open_new_partitions()
        else:
            await linger(gateway.streams)

    async def _open_new_partitions(self) -> None:
        """Begin with partitions that the topic has got meanwhile."""
        described = self._connection.ask(TopicDescribe(self._topic), _EMPTY)
        if isinstance(described, PendingAnswer):
            described = await self._connection.answered(described)
        for one in described.partitions:
            if one.partition not in self._streams:
                await self._open(one.partition, one.first_offset)

    def _read_some(self, partition: int) -> None:
        """Read the next portion of a partition."""
        gateway, stream = self._connection.gateway, self._streams[partition]
        known, codec = gateway.encoded_batches, self._connection.codec
        try:
            found = stream.read(_PORTION_BYTES, gateway.now_us())
            if found is None:
                return
            for batch in stored_batches(self._connection, self._topic, partition, found.view):
                self._read += [(partition, *one) for one in codec.items(batch, self._topic_id, partition, known)]
        except CorruptBatch as error:
            self._damage = partition, error
            return
        self._read.append((partition, found.next_offset, None))
        if stream.has_more():
            self._be_ready(partition)

    def _send_some(self) -> None:
        """Send messages that were read, as many as the credit allows."""
        codec, position = self._connection.codec, self._position
        items: list[Item] = []
        size_bytes = 0
        while self._read and len(items) < min(self._credit, _DELIVERY_MESSAGES) and size_bytes < _DELIVERY_BYTES:
            partition, offset, item = self._read.popleft()
            if item is None:
                position[partition] = max(position[partition], offset)
            elif offset >= position[partition]:
                position[partition] = offset + 1
                behind = f"{partition}:{offset + 1}" if len(position) == 1 else position_text(position)
                items.append(codec.with_id(item, behind))
                size_bytes += len(item)
        if items:
            self._credit -= len(items)
            self._connection.send({"push": "Delivery", "fields": {"stream": self._number}}, items)
