"""What a subscription may ask for."""

from collections.abc import Mapping, Sequence

from headrace.client.times import Start, spot_at
from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument


def validate_subscription(
    topics: Sequence[str],
    patterns: Sequence[str],
    group: str | None,
    start: Start | Mapping[int, int],
    partitions: Sequence[int] | None,
    commit: str,
    on_out_of_range: str,
    on_corrupt: object,
) -> None:
    """Check the options of a subscription; raises InvalidArgument."""
    if not topics and not patterns:
        raise InvalidArgument("say which topics to subscribe to, or a pattern of them")
    if commit not in ("auto", "manual"):
        raise InvalidArgument(f"commit is 'auto' or 'manual', not {shown(commit)}")
    if on_out_of_range not in ("earliest", "latest", "raise"):
        raise InvalidArgument(f"on_out_of_range is 'earliest', 'latest' or 'raise', not {shown(on_out_of_range)}")
    if on_corrupt not in ("raise", "skip") and not callable(on_corrupt):
        raise InvalidArgument(f"on_corrupt is 'raise', 'skip' or a callable, not {shown(on_corrupt)}")
    if any(type(number) is not int for number in partitions or ()):
        raise InvalidArgument(f"partitions are numbers, not {shown(partitions)}")
    if group is not None and partitions is not None:
        raise InvalidArgument("a group divides the partitions itself: leave out `partitions`, or the group")
    if isinstance(start, Mapping):
        if group is not None:
            raise InvalidArgument("a group begins at 'earliest', 'latest' or a datetime; seek_group moves it")
        if any(not _is_offset(number) for place in start.items() for number in place):
            raise InvalidArgument(f"start is partitions to offsets, such as {{0: 1000}}, not {shown(start)}")
    elif spot_at(start).kind == "offset" and group is not None:
        raise InvalidArgument("a group begins at 'earliest', 'latest' or a datetime; seek_group moves it")


def _is_offset(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 63
