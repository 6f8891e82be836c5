"""Exceptions by which a handler decides the result of its message."""

from headrace.client.times import Moment
from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.limits import STATE_BYTES_MAX


class Verdict(Exception):
    """Base class of exceptions that decide the result of a message."""


class Reject(Verdict):
    """Raised by a handler: the message cannot be processed, now or later, and becomes a dead letter.

    Parameters:
        reason: why, for the dead letter.
    """

    def __init__(self, reason: object = "") -> None:
        super().__init__(reason)
        self.reason = "" if reason is None else str(reason)


class Retry(Verdict):
    """Raised by a handler: the message shall be delivered again later.

    Parameters:
        delay: after so many seconds; by default as the subscription's retry settings say.
        until: or at this time.
        state: a few bytes for the next holder, such as the progress so far.
        reason: why, for the dead letter that it may become.
    """

    def __init__(
        self, delay: float | None = None, *, until: Moment | None = None, state: bytes = b"", reason: object = ""
    ) -> None:
        if delay is not None and until is not None:
            raise InvalidArgument("give Retry a delay or a time until, not both")
        if not isinstance(state, bytes):
            raise InvalidArgument(f"a state is bytes, not {shown(state)}")
        if len(state) > STATE_BYTES_MAX:
            raise InvalidArgument(f"a state has at most {STATE_BYTES_MAX} bytes, not {len(state)}")
        super().__init__(reason)
        self.delay = delay
        self.until = until
        self.state = state
        self.reason = "" if reason is None else str(reason)
