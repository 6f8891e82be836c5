"""Which characters names may have, and how the others are quoted."""

import re
from hashlib import sha256
from urllib.parse import quote, unquote

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.limits import TOPIC_NAME_CHARS_MAX

# A slash ends the tenant, stars and question marks make patterns, commas divide lists of names. Control characters,
# line separators and marks that turn the direction of text would make logs and terminals show something else.
_REFUSED = re.compile(r"[/*?,\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_TO_QUOTE = re.compile(rf"^\.\.?$|^\s|\s$|%|{_REFUSED.pattern}")
_FILE_NAME_CHARS_MAX = 200
_DIGEST_CHARS = 16


def checked_characters(name: str, what: str, chars_max: int) -> str:
    """The name, if a `what` may have it: 1 to so many characters, of any script, but for a few.

    >>> checked_characters("_größe 1", "topic", 249)
    '_größe 1'
    """
    if 0 < len(name) <= chars_max and not _REFUSED.search(name) and name.strip() == name and name not in (".", ".."):
        return name
    raise InvalidArgument(
        f"{shown(name)} cannot name a {what}: use 1 to {chars_max} characters, but for control characters, '/', '*', "
        "'?' and ',', without a space at either end; '.' and '..' are no names"
    )


def quoted_name(text: str) -> str:
    """The name that stands for a name of another protocol: what no name may have is quoted as `%XX`, and so is `%`.

    >>> quoted_name("sensors/+/100%")
    'sensors%2F+%2F100%25'
    """
    return _TO_QUOTE.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), text)


def unquoted_name(name: str) -> str:
    """The text for which a quoted name stands.

    >>> unquoted_name("sensors%2F+%2F100%25")
    'sensors/+/100%'
    """
    return unquote(name)


def file_name(name: str) -> str:
    """A name for a file or directory: other characters than letters, digits, `.`, `_` and `-` are quoted as `%XX`.

    Of one that would be long, only the beginning is there, and behind a `~` a digest of all of it.

    >>> file_name("acme/größe"), len(file_name("ß" * 249))
    ('acme%2Fgr%C3%B6%C3%9Fe', 200)
    """
    quoted = quote(name, safe="").replace("~", "%7E")
    if quoted in (".", ".."):
        return quoted.replace(".", "%2E")
    return quoted if len(quoted) <= _FILE_NAME_CHARS_MAX else _with_digest(quoted, _FILE_NAME_CHARS_MAX, name)


def derived_topic(topic: str, suffix: str) -> str:
    """The name of a topic that belongs to another: that one's name, cut if need be, and a suffix.

    >>> derived_topic("acme/orders", ".dead")
    'acme/orders.dead'
    """
    tenant, slash, name = topic.rpartition("/")
    room = TOPIC_NAME_CHARS_MAX - len(suffix)
    return f"{tenant}{slash}{name if len(name) <= room else _with_digest(name, room, name)}{suffix}"


def _with_digest(text: str, chars_max: int, whole: str) -> str:
    kept = re.sub(r"%[0-9A-F]?$", "", text[: chars_max - 1 - _DIGEST_CHARS])
    return f"{kept}~{sha256(whole.encode()).hexdigest()[:_DIGEST_CHARS]}"
