"""The handle of a job, with which its publisher waits for the result."""

from collections.abc import Iterator
from typing import Any

from headrace.client._sync.concurrency import PendingResult
from headrace.client._sync.results.result_reader import ResultReader
from headrace.client.job_results import ExpectedResult
from headrace.client.results import Receipt
from headrace.model.arguments import checked_timeout
from headrace.model.job_requests import JobId
from headrace.model.representation import described, state_of


class JobHandle(PendingResult):
    """The handle of a job. Made by `bus.publish(..., reply=True)`, or `bus.job_result(id)` from the handle's `id`.

    The result is what the handler returned when the job was acknowledged. Failed attempts that are followed by another
    are no result.

    Example:
        >>> app = headrace.App(bus)
        >>> @app.on("jobs")
        ... def work(job):
        ...     app.stop()
        ...     return {"width": 640}
        >>> handle = bus.publish("jobs", b"cat.jpg", reply=True)
        >>> app.run(stop_on_signals=False)
        >>> handle.result(timeout=10)
        {'width': 640}
    """

    def __init__(self, id: JobId, reader: ResultReader, bus: object) -> None:
        self.id = id.text
        """Names the job, also in other processes."""
        self.receipt: Receipt | None = None
        """Where the job is stored; None of a handle that was made from an id."""
        self._expected = ExpectedResult(id)
        self._reader = reader
        reader.expect(self._expected)
        self._bus = bus  # keeps the bus alive as long as the handle

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield self.id
        yield state_of(done=self._expected.stored is not None, pending=True)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result of the job.

        Parameters:
            timeout: for how many seconds; by default as long as it takes.

        Returns:
            What the handler returned: bytes, text, or what JSON can hold.

        Raises:
            JobFailed: if the job failed for good; it has the code and the details of the error.
            Timeout: if there is no result in time. It may still come.

        Example:
            >>> handle = bus.publish("jobs", b"cat.jpg", reply=True)
            >>> try:
            ...     handle.result(timeout=0.01)
            ... except headrace.errors.Timeout:
            ...     print("not yet")
            not yet
        """
        stored = self._expected.stored
        if stored is None:
            stored = self._reader.wait(self._expected, None if timeout is None else checked_timeout(timeout))
        return stored.opened()

    def done(self) -> bool:
        """Return whether there is a result, which may be a failure.

        Returns:
            Whether `result` returns or raises JobFailed at once.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> handle = bus.publish("jobs", b"cat.jpg", reply=True)
            >>> handle.done()
            False
        """
        if self._expected.stored is None:
            self._reader.look()
        return self._expected.stored is not None
