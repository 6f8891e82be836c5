"""Iteration over what is published to subjects, while it is published."""

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.client._sync.concurrency import Lock, breathe, now
from headrace.client._sync.subjects.live_receiver import LiveReceiver
from headrace.client.connection import fork_guard
from headrace.client.subjects.messages import SubjectMessage, messages_of
from headrace.model.errors import Closed
from headrace.model.representation import described, short, state_of

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

_STRETCH_MAX = 100
"""Messages that are handed out before other tasks get a turn."""


class LiveSubscription:
    """Messages of subjects to iterate over. Made by `bus.subjects.subscribe(...)`, which explains the settings.

    It receives what is published from the moment at which it is entered with `with`, or first iterated. What is
    published while the connection is down is lost, and so is what does not fit into the buffer. Only one thread or task
    may use it at a time, except for `stop()`.

    Example:
        >>> with bus.subjects.subscribe("orders.*", timeout=10) as orders:
        ...     published = bus.subjects.publish("orders.eu", b"3 apples")
        ...     for message in orders:
        ...         print(message.subject, message.value)
        ...         break
        orders.eu b'3 apples'
    """

    def __init__(
        self,
        bus: "Bus",
        pattern: str,
        queue: str,
        *,
        timeout: float | None,
        buffer_messages: int,
        buffer_bytes: int,
    ) -> None:
        self._bus = bus
        self.pattern = pattern
        """Which subjects it is about."""
        self.queue = queue
        """The queue whose members share the messages; empty if it gets all."""
        self._timeout = timeout
        self._buffer = buffer_messages, buffer_bytes
        self._closed = False
        self._entered = False
        self._reset()
        bus._keep(self)

    def _reset(self) -> None:
        self._forks = fork_guard.count
        self._beginning = Lock()
        self._begun = False
        self._receiver = LiveReceiver(self._bus._timers, self.pattern, self.queue, *self._buffer)
        self._messages: Iterator[SubjectMessage] = iter(())
        self._at_a_stretch = 0

    @property
    def dropped(self) -> int:
        """How many messages were lost because they were not received fast enough, as far as is known."""
        return self._receiver.dropped

    def begin(self) -> None:
        """Receive from now on; `with` does it, and so does the first step of an iteration.

        Raises:
            InvalidArgument: if the pattern or the queue is wrong.
            Timeout: if the broker does not answer in time.

        Example:
            >>> orders = bus.subjects.subscribe("orders.*")
            >>> orders.begin()
            >>> orders.close()
        """
        fork_guard.check(self._forks, "a live subscription")
        self._check_open()
        if not self._begun:
            with self._beginning:
                self._begin_once()

    def _begin_once(self) -> None:
        if self._begun:
            return
        broker = self._bus._consuming_line()
        try:
            self._receiver.begin(broker)
        except BaseException:
            self._abandon()
            raise
        self._begun = True

    def stop(self) -> None:
        """End the iteration; any thread may call it.

        Example:
            >>> with bus.subjects.subscribe("orders.*") as orders:
            ...     orders.stop()
            ...     for message in orders:
            ...         print("never")
        """
        self._receiver.stop()

    def close(self) -> None:
        """Receive no more.

        Example:
            >>> orders = bus.subjects.subscribe("orders.*")
            >>> orders.close()
        """
        self._close_by(now() + self._bus._timeout)

    def _close_by(self, deadline: float) -> None:
        if not self._closed:
            self._closed = True
            self._bus._forget(self)
            self._receiver.close(deadline)

    def _abandon(self) -> None:
        """Close without waiting for the broker."""
        if not self._closed:
            self._closed = True
            self._bus._forget(self)
            self._receiver.abandon()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the live subscription is closed; make another")

    def _disown(self) -> None:
        """In a forked child: give up a subscription that the parent began; one that has not begun can begin here."""
        begun, forks = self._begun, self._forks
        self._reset()
        if begun:
            self._closed, self._forks = True, forks

    def __iter__(self) -> Iterator[SubjectMessage]:
        """Iterate over the messages, until the timeout or `stop()`."""
        try:
            while (message := self._next()) is not None:
                yield message
        finally:
            if not self._entered:
                self.close()

    def _next(self) -> SubjectMessage | None:
        self.begin()
        for message in self._messages:
            self._at_a_stretch += 1
            if self._at_a_stretch >= _STRETCH_MAX:
                self._at_a_stretch = 0
                breathe()
            return message
        taken = self._receiver.take(None if self._timeout is None else now() + self._timeout)
        if taken is None:
            return None
        self._messages = messages_of(*taken)
        return next(self._messages)

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield f"{self.pattern} queue={short(self.queue)}" if self.queue else self.pattern
        yield f"dropped={self.dropped}"
        yield state_of(
            forked=self._forks != fork_guard.count, closed=self._closed, listening=self._begun, not_begun=True
        )

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True) and self._begun:
            self._bus._timers.aside(self._abandon)

    def __enter__(self) -> "LiveSubscription":
        self._entered = True
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
