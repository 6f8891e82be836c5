"""Reads a partition of the results topic while somebody waits for a result in it."""

import logging
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from headrace.client._sync.concurrency import Monitor, Task, now, spawn
from headrace.client._sync.consumer.batch_fetch import fetch_batches
from headrace.client.connection import fork_guard
from headrace.client.job_results import ExpectedResult, StoredResult, stored_results
from headrace.model.errors import Closed, CorruptBatch, HeadraceError, OffsetOutOfRange, PartitionNotFound, Timeout
from headrace.model.job_requests import RESULTS_TOPIC, ResultsOpen
from headrace.model.requests import Offsets

if TYPE_CHECKING:
    from headrace.client._sync.connection.reconnecting import ReconnectingConnection

logger = logging.getLogger("headrace.client")

_BYTES_MAX = 1 << 20
_HELD_S = 5.0
"""How long the broker holds a request for results that are not there yet."""
_RETRY_S = 0.2
"""The delay before a failed request is retried, in addition to what the connection has tried."""


class ResultReader:
    """Reads results from an offset on, for all that are expected in this partition."""

    def __init__(self, broker: "ReconnectingConnection", partition: int, offset: int) -> None:
        self.partition = partition
        self._broker = broker
        self._offset = offset
        self._forks = fork_guard.count
        self._monitor = Monitor()
        self._expected: WeakValueDictionary[str, ExpectedResult] = WeakValueDictionary()
        self._waiting = 0
        self._reading: Task | None = None
        self._failure: HeadraceError | None = None

    def expect(self, expected: ExpectedResult) -> None:
        """Fill in a result when it is read; called before the job is published."""
        with self._monitor.guard:
            self._expected[expected.id.text] = expected

    def skip_to(self, offset: int) -> None:
        """Leave out results before an offset, if none is expected."""
        with self._monitor.guard:
            if not self._expected and self._reading is None:
                self._offset = max(self._offset, offset)

    def wait(self, expected: ExpectedResult, timeout: float | None) -> StoredResult:
        """Wait until a result is read."""
        fork_guard.check(self._forks, "a job's handle")
        deadline = None if timeout is None else now() + timeout
        with self._monitor.guard:
            self._waiting += 1
            try:
                while expected.stored is None:
                    if self._reading is None:
                        self._failure = None
                        self._reading = spawn("results", self._read)
                    left = None if deadline is None else deadline - now()
                    if not self._monitor.wait(left) and expected.stored is None:
                        raise Timeout(f"no result of job {expected.id.text} within {timeout:.3g} s; it may still come")
                    if self._failure is not None and expected.stored is None:
                        raise self._failure
            finally:
                self._waiting -= 1
        return expected.stored

    def look(self) -> None:
        """Read all results that are there now."""
        fork_guard.check(self._forks, "a job's handle")
        while self._read_some(0):
            pass

    def _read(self) -> None:
        """Read on while somebody waits."""
        failure: HeadraceError | None = Closed("reading results was cancelled")
        try:
            while self._waiting:
                try:
                    self._read_some(_HELD_S)
                except HeadraceError as error:
                    if not error.retryable or self._broker.closed:
                        raise
                    with self._monitor.guard:
                        self._monitor.wait(_RETRY_S)
            failure = None
        except HeadraceError as error:
            failure = error
        finally:
            with self._monitor.guard:
                self._failure = failure
                self._reading = None
                self._monitor.notify()  # who has come meanwhile reads on

    def _read_some(self, wait: float) -> bool:
        """Read the next results, or wait for them so long; returns whether there may be more."""
        offset, found = self._offset, list[dict[str, StoredResult]]()
        try:
            batches = fetch_batches(self._broker, RESULTS_TOPIC, self.partition, offset, _BYTES_MAX, wait)
            found = [stored_results(batch) for batch in batches]
            following = batches[-1].next_offset if batches else offset
        except OffsetOutOfRange:  # older ones were removed, or the topic was created again
            answer = self._broker.request(Offsets(RESULTS_TOPIC, [self.partition], "earliest"))
            following = answer.offsets[self.partition]
        except PartitionNotFound:  # the topic was created again with fewer: results are in the number modulo theirs
            count = len((self._broker.request(ResultsOpen())).ends)
            if self.partition < count:
                raise
            self.partition %= count
            return self._read_some(wait)
        except CorruptBatch as error:
            logger.warning("results are damaged and left out  reason=%s", error)
            following = error.next_offset
        with self._monitor.guard:
            self._offset = following
            for results in found:
                self._tell(results)
            if found:
                self._monitor.notify()
        return following > offset

    def _tell(self, results: dict[str, StoredResult]) -> None:
        for id in results.keys() & self._expected.keys():
            expected = self._expected.pop(id, None)
            if expected is not None:
                expected.stored = expected.stored or results[id]
