"""The id of an event: the whole position of its reader, over all partitions."""

import re
from typing import Annotated, Literal

import msgspec

from headrace.gateways.http.call import Call
from headrace.gateways.http.problems import HttpError
from headrace.model.arguments import shown
from headrace.model.errors import GroupNotFound
from headrace.model.requests import Commit, GroupDescribe, Offsets, PartitionOffset

POSITION_PATTERN = r"^([0-9]{1,4}:[0-9]{1,18})(,[0-9]{1,4}:[0-9]{1,18})*$"
_POSITION = re.compile(r"[0-9]{1,4}:[0-9]{1,18}(?:,[0-9]{1,4}:[0-9]{1,18})*")
_POSITION_CHARS_MAX = 24 * 1024


class StreamQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Where to begin."""

    start: Literal["earliest", "latest"] | None = None
    """Without a position: where a group has none, and in a batch, `earliest` by default; else `latest`."""
    position: Annotated[str, msgspec.Meta(pattern=f"^$|{POSITION_PATTERN}")] = ""
    """As Last-Event-ID, for clients that cannot set a header."""
    group: str = ""
    """Begin where this group is. The position given is committed for it first."""
    format: Literal["json", "cloudevents"] = "json"
    """`cloudevents`: each message is a CloudEvent in JSON."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    """Of a batch: how many messages at most, 100 by default."""


def parse_position(text: str) -> dict[int, int]:
    """By partition, the offset of the next message.

    >>> parse_position("0:17,1:4")
    {0: 17, 1: 4}
    """
    if len(text) > _POSITION_CHARS_MAX or not _POSITION.fullmatch(text):
        raise HttpError("invalid_field", f"a position is partitions and offsets, such as 0:17,1:4, not {shown(text)}")
    pairs = [pair.split(":") for pair in text.split(",")]
    position = {int(partition): int(offset) for partition, offset in pairs}
    if len(position) != len(pairs):
        raise HttpError("invalid_field", f"a position has each partition once, unlike {shown(text)}")
    return position


def position_text(position: dict[int, int]) -> str:
    """The position as an id.

    >>> position_text({1: 4, 0: 17})
    '0:17,1:4'
    """
    return ",".join(f"{partition}:{offset}" for partition, offset in sorted(position.items()))


async def start_position(
    call: Call, topic: str, query: StreamQuery, given: dict[int, int] | None, start: Literal["earliest", "latest"]
) -> dict[int, int]:
    """Where to begin in each partition: at a position that is given, at the committed one of a group, or at `start`."""
    start = query.start or ("earliest" if query.group else start)
    if given is not None:
        if query.group:
            places = [PartitionOffset(topic, number, offset) for number, offset in given.items()]
            await call.ask(Commit(query.group, places))
        first = (await call.ask(Offsets(topic, [], "earliest"))).offsets
        return {**first, **given}
    position = dict((await call.ask(Offsets(topic, [], start))).offsets)
    if query.group:
        try:
            group = await call.ask(GroupDescribe(query.group))
        except GroupNotFound:
            return position
        position.update({one.partition: one.offset for one in group.places if one.topic == topic})
    return position
