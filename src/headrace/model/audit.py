"""Records of the audit trail: one schema, and how each is chained to the one before it."""

from hashlib import sha256
from typing import Any

import msgspec

from headrace.model.errors import InvalidArgument
from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, declare

NO_DIGEST = "0" * 64
"""What the first record of a trail has as the digest of the one before."""
DONE = "done"
"""The outcome of an action that succeeded; else the code of the error."""
LOGIN = "Login"
"""The action of a client that was authenticated and has opened a session, or was refused."""
SUMMARY = "Summary"
"""The action of a record that counts logins or refused attempts that were too many to be recorded one by one."""
BROKEN = "TrailBroken"
"""The action of a record that the broker writes when records are missing or altered that it had stored before."""


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what, or tried to, as JSON in the topic `headrace.audit`."""

    number: int
    """Counts the records of a trail, from 1."""
    previous: str
    """SHA-256 of the value of the record before, in hex: of its bytes as they are stored."""
    time_us: int
    """When it happened, in microseconds since 1970."""
    action: str
    """The name of the request, such as `TopicDelete`; or Login, Summary, TrailBroken."""
    outcome: str = DONE
    """`done`, or the code of the error."""
    identity: str = ""
    token_id: str = ""
    """The id of the token that the identity was authenticated with, if it was one."""
    tenant: str = ""
    """The tenant of the session."""
    gateway: str = ""
    address: str = ""
    client: str = ""
    """What the client calls itself: not verified."""
    resources: list[str] = []
    """What the action was about, such as `delete topic orders`."""
    details: dict[str, Any] = {}
    """More, by action: the grants of a role, the identity of a token. Never a secret."""


class AuditHead(msgspec.Struct, frozen=True):
    """The last record of a trail: whoever remembers it elsewhere can prove that nothing before it was changed."""

    number: int = 0
    """0: there is no record."""
    digest: str = NO_DIGEST
    offset: int = -1

    def __str__(self) -> str:
        return f"{self.number}:{self.digest}"


class AuditInfo(Answer):
    """The answer to AuditDescribe."""

    enabled: bool
    """Whether actions are recorded now."""
    number: int = 0
    digest: str = NO_DIGEST
    offset: int = -1
    """Of the last record that is stored."""
    lost: int = 0
    """Records that could not be stored since the broker started, and that no later record tells of yet."""


@declare(Kind.AUDIT_DESCRIBE, Permission(Verb.CONSUME, Resource.TOPIC))
class AuditDescribe(Request[AuditInfo]):
    """Describe the audit trail of the session's tenant."""


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(AuditRecord)


def encode_record(record: AuditRecord) -> bytes:
    """Encode a record as JSON."""
    return _encoder.encode(record)


def decode_record(content: bytes) -> AuditRecord:
    """Decode the value of a message of the topic `headrace.audit`.

    >>> record = AuditRecord(number=1, previous=NO_DIGEST, time_us=0, action="TopicDelete", identity="ada")
    >>> decode_record(encode_record(record)).identity
    'ada'
    """
    try:
        return _decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"the message is no record of an audit trail: {error}") from error


def record_digest(content: bytes) -> str:
    """The digest of a record, by its stored bytes."""
    return sha256(content).hexdigest()


def parse_head(text: str) -> AuditHead:
    """Parse `NUMBER:DIGEST`, as `headrace audit verify` prints it.

    >>> parse_head("3:" + "ab" * 32).number
    3
    """
    number, _, digest = text.partition(":")
    if not number.isascii() or not number.isdigit() or len(number) > 18 or len(digest) != len(NO_DIGEST):
        raise InvalidArgument("a head is NUMBER:DIGEST, as `headrace audit verify` prints it, with 64 hex digits")
    if set(digest.lower()) - set("0123456789abcdef"):
        raise InvalidArgument("the digest of a head has 64 hex digits")
    return AuditHead(int(number), digest.lower())
