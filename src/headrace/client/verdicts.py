"""What a handler can raise to say what is to become of its message."""

from headrace.client.times import Moment


class Verdict(Exception):
    """What is to become of the message that is being handled."""


class Reject(Verdict):
    """The message cannot be processed, now or later: it becomes a dead letter.

    Parameters:
        reason: why, for whoever looks at the dead letter.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Retry(Verdict):
    """The message is to be handed out again later.

    Parameters:
        delay: after so many seconds; by default as the subscription's retry settings say.
        until: or at this time.
        state: a few bytes for the next one who has it, such as how far this one came.
        reason: why, should it become a dead letter.
    """

    def __init__(
        self, delay: float | None = None, *, until: Moment | None = None, state: bytes = b"", reason: str = ""
    ) -> None:
        super().__init__(reason)
        self.delay = delay
        self.until = until
        self.state = state
        self.reason = reason
