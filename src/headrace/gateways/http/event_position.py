"""The id of an event: the whole position of its reader, over all partitions."""

import re

from headrace.gateways.http.problems import HttpError
from headrace.model.arguments import shown

POSITION_PATTERN = r"^([0-9]{1,4}:[0-9]{1,18})(,[0-9]{1,4}:[0-9]{1,18})*$"
_POSITION = re.compile(r"[0-9]{1,4}:[0-9]{1,18}(?:,[0-9]{1,4}:[0-9]{1,18})*")
_POSITION_CHARS_MAX = 24 * 1024


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
