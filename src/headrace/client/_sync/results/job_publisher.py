"""Publishes jobs whose results are awaited, and finds their results again."""

import random
import secrets
from typing import TYPE_CHECKING

from headrace.client._sync.concurrency import Lock, now
from headrace.client._sync.results.job_handle import JobHandle
from headrace.client._sync.results.result_reader import ResultReader
from headrace.model.job_requests import ResultsOpen, job_id, parse_job_id

if TYPE_CHECKING:
    from headrace.client._sync.connection.reconnecting import ReconnectingConnection

_FLOOR_S = 10.0
"""After so long the end of the results is asked for again, so that the ids of new jobs name a recent offset."""


class JobPublisher:
    """Gives jobs their ids. All jobs of a bus get their results in one partition, which the bus reads."""

    def __init__(self, broker: "ReconnectingConnection") -> None:
        self._broker = broker
        self._begin()

    def _begin(self) -> None:
        self._lock = Lock()
        self._reader: ResultReader | None = None
        self._floor = 0
        """No job that is published now has its result before this offset."""
        self._asked_at = 0.0

    def disown(self) -> None:
        """In a forked child: leave the handles to the parent."""
        self._begin()

    def new_handle(self, bus: object) -> JobHandle:
        """The handle of a job that is about to be published with `reply_headers`."""
        reader = self._open()
        id = job_id(reader.partition, self._floor, secrets.token_urlsafe(16))
        return JobHandle(id, reader, bus)

    def handle(self, id: str, bus: object) -> JobHandle:
        """A handle for a job that was published before, here or in another process."""
        known = parse_job_id(id)
        return JobHandle(known, ResultReader(self._broker, known.partition, known.offset), bus)

    def _open(self) -> ResultReader:
        """The reader of this bus' results, with a floor that is recent."""
        with self._lock:
            if self._reader is None or now() - self._asked_at > _FLOOR_S:
                ends = (self._broker.request(ResultsOpen())).ends
                self._asked_at = now()
                if self._reader is None:
                    partition = random.randrange(len(ends))
                    self._reader = ResultReader(self._broker, partition, ends[partition])
                self._floor = ends[self._reader.partition]
                self._reader.skip_to(self._floor)
            return self._reader
