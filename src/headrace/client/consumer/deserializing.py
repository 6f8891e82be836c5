"""Deserializes received messages, and applies `on_error` to those that cannot be deserialized."""

import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from headrace.client.producer.serializing import CannotDeserialize, Deserializer
from headrace.client.results import Received, ReceivedBatch
from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument

logger = logging.getLogger("headrace.client")

OnError = Literal["raise", "skip"] | Callable[[CannotDeserialize], Any]


class BatchDeserializer:
    """Deserializes the messages of batches."""

    def __init__(self, deserializer: Deserializer | None, on_error: OnError) -> None:
        if on_error not in ("raise", "skip") and not callable(on_error):
            raise InvalidArgument(f"on_error is 'raise', 'skip' or a callable, not {shown(on_error)}")
        self._deserializer = deserializer
        self._on_error = on_error

    def messages(self, batch: ReceivedBatch) -> Iterator[Received]:
        """The messages of a batch. If one raises, the iterator goes on behind it all the same."""
        if self._deserializer is None:
            return batch.messages()
        return _DeserializedMessages(batch.messages(), self._deserializer, self._on_error)


class _DeserializedMessages:
    """An iterator that outlives its errors, which a generator does not."""

    def __init__(self, messages: Iterator[Received], deserializer: Deserializer, on_error: OnError) -> None:
        self._messages = messages
        self._deserializer = deserializer
        self._on_error = on_error

    def __iter__(self) -> "_DeserializedMessages":
        return self

    def __next__(self) -> Received:
        for message in self._messages:
            if message.value is None:
                return message
            try:
                value = self._deserializer(message.value)
            except Exception as reason:
                error = CannotDeserialize(message.topic, message.partition, message.offset, reason, message)
                if self._on_error == "raise":
                    raise error from reason
                if self._on_error == "skip":
                    logger.warning("skipped: %s", error)
                    continue
                assert callable(self._on_error)
                value = self._on_error(error)
            return msgspec.structs.replace(message, value=value)
        raise StopIteration
