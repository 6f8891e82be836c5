"""Headers of messages as headers of HTTP, both ways. Only named ones pass: credentials and cookies never do."""

import re
from urllib.parse import quote, unquote_to_bytes

from headrace.gateways.http.problems import HttpError
from headrace.model.envelope import CONTENT_TYPE_HEADER
from headrace.model.headers import Headers, header_pairs, headers_from_pairs

HEADER_PREFIX = "headrace-header-"
"""Before the name of a header of the message, in requests and in replies."""
_PLAIN = frozenset({CONTENT_TYPE_HEADER, "traceparent", "tracestate", "baggage"})
"""Headers that HTTP and messages have in common."""
_PLAIN_PREFIX = "ce-"
_SAFE = "!#$&'()*+,/:;<=>?@[]^`{|}~ "
_MEDIA_TYPE = re.compile(rb"[\x21-\x7e][\x20-\x7e]*")
_NAME_CHARS_MAX = 256
"""Of a header in a response; clients of HTTP refuse whole responses for names that are very long."""
OCTETS = b"application/octet-stream"


def message_headers(headers: dict[bytes, bytes]) -> Headers:
    """The headers of a message, from those of a request.

    >>> message_headers({b"host": b"a", b"content-type": b"text/plain", b"headrace-header-lang": b"gr%C3%BC"})
    {'content-type': b'text/plain', 'lang': b'gr\\xc3\\xbc'}
    """
    pairs: list[tuple[str, bytes | None]] = []
    for raw_name, content in headers.items():
        name = raw_name.decode("latin-1")
        if name in _PLAIN or name.startswith(_PLAIN_PREFIX):
            pairs.append((name, content))
        elif name.startswith(HEADER_PREFIX):
            try:
                own = unquote_to_bytes(name.removeprefix(HEADER_PREFIX)).decode()
            except UnicodeDecodeError as error:
                raise HttpError("invalid_encoding", f"the name of the header {name} is no UTF-8") from error
            if not own:
                raise HttpError("invalid_field", f"the name of a message's header follows {HEADER_PREFIX}")
            pairs.append((own, unquote_to_bytes(content)))
    return headers_from_pairs(pairs) or {}


def response_headers(headers: Headers) -> tuple[bytes, tuple[tuple[bytes, bytes], ...]]:
    """The content type of a message, and its other headers, as those of a response, without those of very long names.

    >>> response_headers({"content-type": b"text/plain", "set-cookie": b"a=1"})
    (b'text/plain', ((b'headrace-header-set-cookie', b'a=1'),))
    """
    content_type, found = OCTETS, []
    for name, content in header_pairs(headers):
        lower = name.lower()
        if lower == CONTENT_TYPE_HEADER:
            if content is not None and _MEDIA_TYPE.fullmatch(content):
                content_type = content
        elif lower in _PLAIN or (lower.startswith(_PLAIN_PREFIX) and _is_token(lower)):
            found.append((lower.encode(), quote(content or b"", safe=_SAFE + "%").encode()))
        else:
            own = quote(name.encode("utf-8", "surrogateescape"), safe="!#$&'*+^`|~")
            found.append(((HEADER_PREFIX + own).encode(), quote(content or b"", safe=_SAFE).encode()))
    return content_type, tuple(pair for pair in found if len(pair[0]) <= _NAME_CHARS_MAX)


def _is_token(name: str) -> bool:
    return name.isascii() and all(one.isalnum() or one in "!#$%&'*+-.^_`|~" for one in name)
