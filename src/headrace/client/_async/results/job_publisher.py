"""Publishes jobs whose results are awaited, and finds their results again."""

import random
import secrets
from typing import TYPE_CHECKING

from headrace.client._async.concurrency import Lock, now
from headrace.client._async.results.job_handle import AsyncJobHandle
from headrace.client._async.results.result_reader import AsyncResultReader
from headrace.model.job_requests import ResultsOpen, job_id, parse_job_id

if TYPE_CHECKING:
    from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection

_FLOOR_S = 10.0
"""After so long the end of the results is asked for again, so that the ids of new jobs name a recent offset."""


class AsyncJobPublisher:
    """Gives jobs their ids. All jobs of a bus get their results in one partition, which the bus reads."""

    def __init__(self, broker: "AsyncReconnectingConnection") -> None:
        self._broker = broker
        self._begin()

    def _begin(self) -> None:
        self._lock = Lock()
        self._reader: AsyncResultReader | None = None
        self._floor = 0
        """No job that is published now has its result before this offset."""
        self._asked_at = 0.0

    def disown(self) -> None:
        """In a forked child: leave the handles to the parent."""
        self._begin()

    async def new_handle(self, bus: object) -> AsyncJobHandle:
        """The handle of a job that is about to be published with `reply_headers`."""
        reader = await self._open()
        id = job_id(reader.partition, self._floor, secrets.token_urlsafe(16))
        return AsyncJobHandle(id, reader, bus)

    def handle(self, id: str, bus: object) -> AsyncJobHandle:
        """A handle for a job that was published before, here or in another process."""
        known = parse_job_id(id)
        return AsyncJobHandle(known, AsyncResultReader(self._broker, known.partition, known.offset), bus)

    async def _open(self) -> AsyncResultReader:
        """The reader of this bus' results, with a floor that is recent."""
        async with self._lock:
            if self._reader is None or now() - self._asked_at > _FLOOR_S:
                ends = (await self._broker.request(ResultsOpen())).ends
                self._asked_at = now()
                if self._reader is None:
                    partition = random.randrange(len(ends))
                    self._reader = AsyncResultReader(self._broker, partition, ends[partition])
                self._floor = ends[self._reader.partition]
                self._reader.skip_to(self._floor)
            return self._reader
