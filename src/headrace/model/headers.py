"""A message's headers: pairs of a name and a value, in which names may repeat and a value may be None."""

from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, TypeVar

import msgspec

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument

HeaderPair = tuple[str, bytes | None]
_Default = TypeVar("_Default")


class RepeatedHeaders(msgspec.Struct, array_like=True, frozen=True, gc=False, eq=False, repr_omit_defaults=True):
    """Headers in which a name repeats: a mapping of each name to its last value, and all pairs in order."""

    names: list[str]
    contents: list[bytes | None]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.contents):
            raise ValueError(f"there are {len(self.contents)} values for {len(self.names)} names of headers")

    def pairs(self) -> list[HeaderPair]:
        """All headers in the order in which they were published."""
        return list(zip(self.names, self.contents, strict=True))

    def mapping(self) -> dict[str, bytes | None]:
        """Each name with its last value."""
        return dict(zip(self.names, self.contents, strict=True))

    def get(self, name: str, default: _Default | None = None) -> bytes | _Default | None:
        """The last value of a name, or the default."""
        return self.mapping().get(name, default)

    def keys(self) -> KeysView[str]:
        """The names, each once."""
        return self.mapping().keys()

    def values(self) -> ValuesView[bytes | None]:
        """The last value of each name."""
        return self.mapping().values()

    def items(self) -> ItemsView[str, bytes | None]:
        """Each name with its last value."""
        return self.mapping().items()

    def __getitem__(self, name: str) -> bytes | None:
        return self.mapping()[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.mapping())

    def __len__(self) -> int:
        return len(set(self.names))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RepeatedHeaders):
            return self.names == other.names and self.contents == other.contents
        return self.mapping() == other

    __hash__ = None  # type: ignore[assignment]  # as every mapping's


Mapping.register(RepeatedHeaders)

Headers = dict[str, bytes | None] | RepeatedHeaders
"""Headers as they are stored and received; a plain dictionary where no name repeats."""
GivenHeaders = Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]] | RepeatedHeaders
"""Headers as a caller may give them: a mapping, or pairs where a name repeats. Text is stored as UTF-8."""


def checked_headers(headers: GivenHeaders | None) -> Headers | None:
    """Headers as they are stored, None if there are none; raises InvalidArgument for anything else.

    >>> checked_headers({"lang": "en"})
    {'lang': b'en'}
    >>> checked_headers([("a", b"1"), ("a", None)]).pairs()
    [('a', b'1'), ('a', None)]
    """
    pairs: object = headers
    if type(headers) is RepeatedHeaders:
        pairs = headers.pairs()
    elif isinstance(headers, Mapping):
        stored: dict[str, bytes | None] = {}
        for name, content in headers.items():
            if type(content) is bytes and type(name) is str and name.isascii():
                stored[name] = content
            else:
                stored[name] = _checked_content(name, content)
        return stored or None
    elif headers is None:
        return None
    if isinstance(pairs, str | bytes | bytearray | memoryview) or not isinstance(pairs, Sequence):
        raise InvalidArgument(
            f"headers are a mapping of names to text, bytes or None, or a list of such pairs, not {shown(headers)}"
        )
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidArgument(f"a header is a pair of a name and text, bytes or None, not {shown(pair)}")
    return headers_from_pairs((name, _checked_content(name, content)) for name, content in pairs)


def _checked_content(name: Any, content: Any) -> bytes | None:
    """The value of a header as it is stored, if the name can be stored too."""
    try:
        name.encode()
        if content is None or type(content) is bytes:
            return content
        return content.encode() if isinstance(content, str) else bytes(memoryview(content))
    except (AttributeError, TypeError) as error:
        raise InvalidArgument(
            f"a header is a name and text, bytes or None, not {shown(name)}: {shown(content)}"
        ) from error
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"header {shown(name)} is no text that UTF-8 can hold: {error}") from error


def headers_from_pairs(pairs: Iterable[HeaderPair]) -> Headers | None:
    """The headers that have these pairs; None if there are none."""
    listed = list(pairs)
    plain = dict(listed)
    if len(plain) == len(listed):
        return plain or None
    return RepeatedHeaders([name for name, _ in listed], [content for _, content in listed])


def header_pairs(headers: Headers | None) -> list[HeaderPair]:
    """All headers in order."""
    if not headers:
        return []
    return headers.pairs() if type(headers) is RepeatedHeaders else list(headers.items())


def header_text(headers: Headers, name: str) -> bytes:
    """The last value of a name; empty bytes if the name is missing or has None."""
    return headers.get(name) or b""


def without_headers(headers: Headers | None, unwanted: Callable[[str], bool]) -> Headers:
    """The headers but for those whose name is unwanted."""
    return headers_from_pairs(pair for pair in header_pairs(headers) if not unwanted(pair[0])) or {}


def replaced_headers(headers: Headers | None, others: Mapping[str, bytes | None]) -> Headers:
    """The headers with each of the others in place of all of its name."""
    if type(headers) is not RepeatedHeaders:
        return {**(headers or {}), **others}
    kept = [pair for pair in headers.pairs() if pair[0] not in others]
    return headers_from_pairs([*kept, *others.items()]) or {}


def name_value_lists(headers: Headers) -> tuple[Collection[str], Collection[bytes | None]]:
    """The names and the values of all headers in order."""
    if type(headers) is RepeatedHeaders:
        return headers.names, headers.contents
    return headers.keys(), headers.values()


def header_bytes(headers: Headers | None) -> int:
    """How many bytes the names and values have."""
    if not headers:
        return 0
    size = 0
    for name, content in headers.items() if type(headers) is dict else header_pairs(headers):
        size += len(name) if name.isascii() else len(name.encode())
        if content is not None:
            size += len(content)
    return size


def header_count(headers: Headers | None) -> int:
    """How many pairs there are."""
    return 0 if headers is None else len(headers.names if type(headers) is RepeatedHeaders else headers)
