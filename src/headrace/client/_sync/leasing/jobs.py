"""Iteration over the messages of a leased subscription, with prefetch."""

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.client._sync.concurrency import now
from headrace.client._sync.leasing.acknowledger import Acknowledger, UnansweredAcks
from headrace.client._sync.leasing.prefetch import Prefetcher
from headrace.client.connection import fork_guard
from headrace.client.leasing.deserializing import JobDeserializer, told
from headrace.client.leasing.jobs import Job, holdings_of
from headrace.client.leasing.prefetch_window import PrefetchWindow
from headrace.model.errors import Closed
from headrace.model.leasing import Release, cut_reason
from headrace.model.representation import described, short, state_of

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus


class Jobs:
    """Leased messages to iterate over. Made by `queue.jobs(...)`, which explains the settings.

    Only one thread or task may use it at a time, except for `stop()`. Leases of the messages that it holds are extended
    automatically. In a `with` block, a loop that is left with `break` has processed its last message; otherwise that
    message is released, to be delivered again.

    Example:
        >>> receipts = bus.publish_many("jobs", [b"resize 1.png", b"resize 2.png"])
        >>> with bus.queue("jobs").jobs(timeout=1) as jobs:
        ...     for job in jobs:
        ...         print(job.value)
        b'resize 1.png'
        b'resize 2.png'
    """

    def __init__(
        self,
        bus: "Bus",
        acknowledger: Acknowledger,
        unpacking: JobDeserializer,
        *,
        prefetch: int,
        lease_ms: int,
        auto: bool,
        timeout: float | None,
        create: bool = False,
    ) -> None:
        self._bus = bus
        self._acknowledger = acknowledger
        self._unpacking = unpacking
        self._auto = auto
        self._timeout = timeout
        self._prefetch = Prefetcher(
            bus, acknowledger, window=PrefetchWindow(prefetch), lease_ms=lease_ms, create_topic=create
        )
        self._said = UnansweredAcks()
        self._current: Job | None = None
        self._begun = False
        self._entered = False
        self._closed = False
        self._forks = fork_guard.count

    def __iter__(self) -> Iterator[Job]:
        """Iterate over the messages, each not before it is due."""
        try:
            while (job := self._next()) is not None:
                yield job
        finally:
            if not self._entered:
                self.close()

    def stop(self) -> None:
        """End the iteration after the current message; any thread may call it.

        Example:
            >>> receipts = bus.publish_many("jobs", [b"resize 1.png", b"resize 2.png"])
            >>> with bus.queue("jobs").jobs() as jobs:
            ...     for job in jobs:
            ...         print(job.value)
            ...         jobs.stop()
            b'resize 1.png'
        """
        self._prefetch.stop()

    def close(self) -> None:
        """Release the messages that were leased ahead, and the last one if it is not settled, and close.

        Example:
            >>> receipt = bus.publish("jobs", b"resize cat.jpg")
            >>> jobs = bus.queue("jobs").jobs()
            >>> jobs.close()
        """
        self._close_by(now() + self._acknowledger.timeout)

    def _close_by(self, deadline: float) -> None:
        """Close, and wait for the broker until the deadline."""
        if self._closed:
            return
        self._closed = True
        self._bus._forget(self)
        self._give_back_current("")
        self._prefetch.close(deadline)
        self._said.answered(deadline - now())

    def _abandon(self) -> None:
        """Close without waiting for the broker."""
        if not self._closed:
            self._closed = True
            self._give_back_current("")
            self._prefetch.abandon()

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield f"{self._acknowledger.topic} subscription={short(self._acknowledger.subscription)}"
        yield state_of(forked=self._forks != fork_guard.count, closed=self._closed, leasing=self._begun, not_begun=True)

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True) and self._begun:
            self._bus._timers.aside(self._abandon)

    def __enter__(self) -> "Jobs":
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish_current()
        else:
            self._give_back_current(told(error))
        self.close()

    def _next(self) -> Job | None:
        """Return the next message; the previous one counts as processed now."""
        self._finish_current()
        fork_guard.check(self._forks, "a series of leased messages")
        if self._closed:
            raise Closed("these jobs are closed; ask the queue for others")
        if not self._begun:
            self._prefetch.begin()
            self._begun = True
        deadline = None if self._timeout is None else now() + self._timeout
        while (job := self._prefetch.take(deadline)) is not None:
            opened = self._unpacking.opened(job)
            if isinstance(opened, Job):
                if self._auto:
                    self._current = opened
                return opened
            self._give_back(job, opened)
        return None

    def _disown(self) -> None:
        """In a forked child: give up an iteration that the parent began; one that has not begun can begin here."""
        self._current = None
        self._said = UnansweredAcks()
        if self._begun:
            self._closed = True
        else:
            self._forks = fork_guard.count

    def _finish_current(self) -> None:
        job, self._current = self._current, None
        if job is not None and self._unsettled(job):
            self._said.add(self._acknowledger.ack_one(job, watched=False))

    def _give_back_current(self, reason: str) -> None:
        job, self._current = self._current, None
        if job is not None and self._unsettled(job):
            self._give_back(job, reason)

    def _give_back(self, job: Job, reason: str) -> None:
        acknowledger = self._acknowledger
        head = Release(
            acknowledger.topic, holdings_of([job]), reason=cut_reason(reason), subscription=acknowledger.subscription
        )
        self._said.add(acknowledger.send(head, watched=False))

    def _unsettled(self, job: Job) -> bool:
        """Return whether the program has not settled it; its lease may have expired."""
        with self._acknowledger.monitor.guard:
            return bool(self._acknowledger.held_leases.unsettled((job,)))
