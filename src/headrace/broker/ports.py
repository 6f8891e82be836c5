"""What the broker needs from outside: a thread to run on, and others for what takes long."""

from collections.abc import Callable
from typing import Protocol


class Ports(Protocol):
    """The world around a broker. All of a broker's methods are called on one thread: its own."""

    def soon(self, call: Callable[[], None]) -> None:
        """Call it on the broker's thread, after what is going on now: all that has just arrived comes before."""

    def last(self, call: Callable[[], None]) -> None:
        """Call it on the broker's thread, after all that is to be done soon and what follows from that."""

    def from_thread(self, call: Callable[[], None]) -> None:
        """Call it on the broker's thread; may be said on any thread."""

    def background(self, job: Callable[[], None]) -> None:
        """Run it on another thread, one job after the other: work on files that takes long."""

    def wake_at(self, time_us: int) -> None:
        """Call the broker's `tick` at this time, if it is not called before."""
