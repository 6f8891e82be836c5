"""Triggers of streaming queries."""

import re
from dataclasses import dataclass
from typing import Any

from headrace.model.errors import InvalidArgument

AS_FAST_AS_POSSIBLE = "as fast as possible"
AVAILABLE_NOW = "available now"
_UNITS = "milliseconds?|seconds?|minutes?|hours?|days?"
_SPAN = re.compile(rf"(\d+ +({_UNITS}))( +\d+ +({_UNITS}))*")


@dataclass(frozen=True)
class Trigger:
    """When a query runs: at an interval, once for the available data, or continuously."""

    every: str = ""
    """The interval, such as `10 seconds`; empty for none."""
    available_now: bool = False
    """Whether the query ends after the available data."""

    @property
    def words(self) -> dict[str, Any]:
        """The arguments of Spark's `trigger()`; empty if it need not be called."""
        if self.available_now:
            return {"availableNow": True}
        return {"processingTime": self.every} if self.every else {}

    def __str__(self) -> str:
        return AVAILABLE_NOW if self.available_now else self.every or AS_FAST_AS_POSSIBLE


def trigger_of(text: Any) -> Trigger:
    """Parse a trigger.

    >>> str(trigger_of("1 second")), str(trigger_of(None))
    ('1 second', 'as fast as possible')
    """
    said = " ".join(text.lower().split()) if isinstance(text, str) else text
    if said is None or said == AS_FAST_AS_POSSIBLE:
        return Trigger()
    if said == AVAILABLE_NOW:
        return Trigger(available_now=True)
    if isinstance(said, str) and _SPAN.fullmatch(said):
        return Trigger(every=said)
    raise InvalidArgument(
        f"{text!r} is no trigger: write a time span such as '10 seconds' or '500 milliseconds', '{AVAILABLE_NOW}', or "
        f"'{AS_FAST_AS_POSSIBLE}'"
    )
