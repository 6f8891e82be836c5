"""Subjects: dotted names that can be published to without a topic, and patterns of them in several dialects."""

import re
from enum import Enum
from urllib.parse import unquote

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.limits import PATTERN_RUNS_MAX, SUBJECT_CHARS_MAX, SUBJECT_TOKENS_MAX

ONE = "*"
"""In a pattern: exactly one token."""
MANY = "#"
"""In a pattern: any number of tokens, also none."""
REST = ">"
"""At the end of a pattern: one token or more."""
OWN_MARK = "$"
"""Subjects that begin with it are the broker's own."""
SUBJECT_HEADER = "headrace-subject"
"""The header of a stored message with the subject that it was published to."""

# Beside what makes patterns and tokens: a slash ends the tenant, commas divide lists, and control characters, line
# separators and marks that turn the direction of text would make logs and terminals show something else.
_REFUSED = r"*#>/?,\s\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_SUBJECT = re.compile(rf"[^.{_REFUSED}]+(?:\.[^.{_REFUSED}]+)*")
_TOKEN = re.compile(rf"[^.{_REFUSED}]+|[*#>]")
_TO_QUOTE = re.compile(rf"[.%{_REFUSED}]")
_EMPTY = "%"
"""Stands for an empty token of another dialect: no other text is quoted so."""


class Dialect(Enum):
    """How a protocol writes subjects and patterns."""

    NATIVE = "native"
    """`*` one token, `#` any number of tokens, `>` at the end one or more."""
    AMQP = "amqp"
    """Routing and binding keys: `*` one word, `#` any number of words."""
    MQTT = "mqtt"
    """Topic names and filters: levels between slashes, `+` one level, `#` at the end any number of levels."""
    NATS = "nats"
    """`*` one token, `>` at the end one token or more."""


def checked_subject(subject: str) -> str:
    """The subject, if something can be published to it.

    >>> checked_subject("orders.eu.paid")
    'orders.eu.paid'
    """
    if len(subject) <= SUBJECT_CHARS_MAX and subject.count(".") < SUBJECT_TOKENS_MAX and _SUBJECT.fullmatch(subject):
        return subject
    raise InvalidArgument(
        f"{shown(subject)} is no subject: use 1 to {SUBJECT_CHARS_MAX} characters, up to {SUBJECT_TOKENS_MAX} tokens "
        "with a '.' between them and none empty, without spaces, control characters, '*', '#', '>', '/', '?' and ','"
    )


def is_own(subject: str) -> bool:
    """Whether a subject, or a pattern, is one of the broker's own, to which clients cannot publish.

    >>> is_own("$events.topic.created"), is_own("orders")
    (True, False)
    """
    return subject.startswith(OWN_MARK)


def pattern_tokens(pattern: str) -> tuple[str, ...]:
    """The tokens of a pattern in its normal form, in which there are only words, `*` and `#`.

    In each run of wildcards, the `*` come first and at most one `#` last: so patterns that match the same subjects by
    their wildcards have the same form, and matching never has to try the same thing twice.

    >>> pattern_tokens("orders.>"), pattern_tokens("#.*.#.paid")
    (('orders', '*', '#'), ('*', '#', 'paid'))
    """
    tokens = pattern.split(".")
    if not 0 < len(pattern) <= SUBJECT_CHARS_MAX or not all(map(_TOKEN.fullmatch, tokens)) or REST in tokens[:-1]:
        raise InvalidArgument(
            f"{shown(pattern)} is no pattern of subjects: use 1 to {SUBJECT_CHARS_MAX} characters, tokens with a '.' "
            "between them; '*' stands for one token, '#' for any number, and '>' at the end for one or more, and each "
            "is a token by itself"
        )
    normal: list[str] = []
    for token in tokens:
        if token in (ONE, REST) and normal and normal[-1] == MANY:
            normal.insert(-1, ONE)
        elif token == REST:
            normal += ONE, MANY
        elif token != MANY or not normal or normal[-1] != MANY:
            normal.append(token)
    if normal[:-1].count(MANY) > PATTERN_RUNS_MAX:
        raise InvalidArgument(
            f"the pattern {shown(pattern)} has '#' in {normal[:-1].count(MANY)} places before its end; "
            f"{PATTERN_RUNS_MAX} are the most"
        )
    if len(normal) - normal.count(MANY) > SUBJECT_TOKENS_MAX:
        raise InvalidArgument(
            f"the pattern {shown(pattern)} matches no subject, as one has up to {SUBJECT_TOKENS_MAX} tokens"
        )
    return tuple(normal)


def checked_pattern(pattern: str) -> str:
    """The pattern, if subjects can be matched with it.

    >>> checked_pattern("orders.*.paid")
    'orders.*.paid'
    """
    pattern_tokens(pattern)
    return pattern


def subject_from(text: str, dialect: Dialect) -> str:
    """The subject for a name of another protocol: what no subject may have is quoted as `%XX`.

    >>> subject_from("sensors/room.1/temp", Dialect.MQTT), subject_from("orders.eu", Dialect.AMQP)
    ('sensors.room%2E1.temp', 'orders.eu')
    """
    if dialect is Dialect.NATIVE:
        return checked_subject(text)
    tokens = map(_quoted, text.split(_separator(dialect)))
    return checked_subject(_unowned(".".join(tokens), dialect))


def pattern_from(text: str, dialect: Dialect) -> str:
    """The pattern for one of another protocol.

    >>> pattern_from("sensors/+/#", Dialect.MQTT), pattern_from("orders.*.>", Dialect.NATS)
    ('sensors.*.#', 'orders.*.>')
    """
    if dialect is Dialect.NATIVE:
        return checked_pattern(text)
    wildcards = _WILDCARDS[dialect]
    tokens = text.split(_separator(dialect))
    last_only = {MANY} if dialect is Dialect.MQTT else {REST}
    if last_only.intersection(tokens[:-1]) & wildcards.keys():
        (wildcard,) = last_only
        raise InvalidArgument(f"in the pattern {shown(text)}, {wildcard!r} can only be the last token")
    translated = ".".join(wildcards[token] if token in wildcards else _quoted(token) for token in tokens)
    return checked_pattern(_unowned(translated, dialect))


def subject_as(subject: str, dialect: Dialect) -> str:
    """The name that a subject has in another protocol: the inverse of `subject_from`.

    >>> subject_as("sensors.room%2E1.temp", Dialect.MQTT)
    'sensors/room.1/temp'
    """
    if dialect is Dialect.NATIVE:
        return subject
    tokens = subject.split(".")
    return _separator(dialect).join("" if token == _EMPTY else unquote(token) for token in tokens)


_WILDCARDS = {
    Dialect.AMQP: {"*": ONE, "#": MANY},
    Dialect.MQTT: {"+": ONE, "#": MANY},
    Dialect.NATS: {"*": ONE, ">": REST},
}


def _separator(dialect: Dialect) -> str:
    return "/" if dialect is Dialect.MQTT else "."


def _quoted(token: str) -> str:
    return _TO_QUOTE.sub(_quoted_character, token) if token else _EMPTY


def _quoted_character(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass"))


def _unowned(subject: str, dialect: Dialect) -> str:
    """Quote a leading `$` of a routing key, which means nothing in AMQP."""
    return f"%24{subject[1:]}" if dialect is Dialect.AMQP and subject.startswith(OWN_MARK) else subject
