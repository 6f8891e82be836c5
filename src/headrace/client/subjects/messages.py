"""What comes by subjects: messages of live subscriptions, requests and replies."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import msgspec

from headrace.model.batch import Batch
from headrace.model.headers import GivenHeaders, HeaderPair, Headers, checked_headers, header_pairs
from headrace.model.representation import described_fields


class SubjectMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that was published to a subject."""

    subject: str
    value: bytes | None
    timestamp: int
    """Microseconds since 1970, UTC."""
    key: bytes | None = None
    headers: Headers | None = None

    @property
    def header_list(self) -> list[HeaderPair]:
        """All headers in the order in which they were published, with names that repeat."""
        return header_pairs(self.headers)

    def json(self) -> Any:
        """Decode the value as JSON.

        Returns:
            The decoded value.

        Raises:
            ValueError: if the value is not JSON.

        Example:
            >>> headrace.SubjectMessage("orders.paid", b'{"id": 17}', 0).json()
            {'id': 17}
        """
        return msgspec.json.decode(self.value or b"null")

    def __repr__(self) -> str:
        return described_fields(self)


class IncomingRequest(msgspec.Struct, frozen=True, gc=False):
    """A request, as the handler of a subject gets it."""

    subject: str
    value: Any
    """Bytes, or what the deserializer made of them."""
    headers: Headers
    timeout: float
    """For how many seconds somebody still waited for the reply when the request was delivered."""

    @property
    def header_list(self) -> list[HeaderPair]:
        """All headers in the order in which they were sent, with names that repeat."""
        return header_pairs(self.headers)

    def json(self) -> Any:
        """Decode the value as JSON; only if the handler has no deserializer.

        Returns:
            The decoded value.

        Raises:
            ValueError: if the value is not JSON.

        Example:
            >>> @headrace.App(bus).serves("price.quote")
            ... def quote(request):
            ...     return {"item": request.json()["item"], "price": 4.2}
        """
        return msgspec.json.decode(self.value)

    def __repr__(self) -> str:
        return described_fields(self)


class Reply:
    """The reply to a request: what `bus.request` returns. A handler returns one if its reply shall have headers.

    Parameters:
        value: bytes; text and what can be made into JSON are encoded when a handler returns them.
        headers: names to text, bytes or None, as a mapping; or a list of such pairs, where a name repeats.

    Example:
        >>> Reply(b"3.50", headers={"currency": "eur"})
        Reply(value=b'3.50', headers={'currency': b'eur'})
    """

    __slots__ = ("headers", "value")

    def __init__(self, value: Any = b"", headers: GivenHeaders | None = None) -> None:
        self.value = value
        self.headers: Headers = checked_headers(headers) or {}

    @property
    def header_list(self) -> list[HeaderPair]:
        """All headers in the order in which they were sent, with names that repeat."""
        return header_pairs(self.headers)

    def json(self) -> Any:
        """Decode the value as JSON.

        Returns:
            The decoded value.

        Raises:
            ValueError: if the value is not JSON.

        Example:
            >>> headrace.Reply(b'{"price": 4.2}').json()
            {'price': 4.2}
        """
        return msgspec.json.decode(self.value)

    def __repr__(self) -> str:
        return f"Reply(value={self.value!r}, headers={self.headers!r})"


def messages_of(subject: str, batch: Batch) -> Iterator[SubjectMessage]:
    """The messages of a batch that was delivered."""
    columns = batch.columns()
    return map(
        SubjectMessage,
        repeat(subject),
        columns.values,
        columns.timestamps or repeat(batch.time_max),
        columns.keys or repeat(None),
        columns.headers or repeat(None),
    )
