"""Handling messages with several workers, in order within each partition."""

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from headrace.client._sync.concurrency import HandlerExecutor, Monitor, spawn, stopped_by_signals
from headrace.client._sync.consumer.fetcher import Fetcher
from headrace.client.app.handlers import Handler, checked_handler
from headrace.client.consumer.deserializing import BatchDeserializer
from headrace.client.consumer.partition_reader import PartitionReader
from headrace.client.producer.serializing import CannotDeserialize
from headrace.client.results import Received, ReceivedBatch
from headrace.client.times import checked_count
from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument

logger = logging.getLogger("headrace.client")

OnHandlerError = Literal["raise", "skip"] | Callable[[Received, Exception], None]

_BATCHES_A_WORKER = 4
"""How many batches wait for a worker: enough that none is idle while others are busy with large ones."""


class Runner:
    """Takes batches and lets workers handle their messages; a partition is with one worker at a time."""

    def __init__(
        self,
        fetcher: Fetcher,
        take: Callable[[], Any],
        ended: Callable[[PartitionReader, int], None],
        deserializer: BatchDeserializer,
        handler: Handler,
        workers: int,
        on_error: OnHandlerError,
        auto_commit: bool,
    ) -> None:
        checked_count(workers, "workers")
        if on_error not in ("raise", "skip") and not callable(on_error):
            raise InvalidArgument(f"on_error is 'raise', 'skip' or a callable, not {shown(on_error)}")
        self._fetcher = fetcher
        self._take = take
        self._ended = ended
        self._deserializer = deserializer
        self._handler = checked_handler(handler)
        self._executor = HandlerExecutor(workers)
        self._workers = workers
        self._on_error = on_error
        self._auto_commit = auto_commit
        self._monitor = Monitor()
        self._queues: dict[PartitionReader, deque[ReceivedBatch]] = {}
        """Partitions that have work, or that a worker has."""
        self._free: deque[PartitionReader] = deque()
        """Partitions with work that no worker has."""
        self._queued = 0
        self._no_more = False
        self._error: Exception | None = None

    def run(self, stop: Callable[[], None], stop_on_signals: bool) -> None:
        """Go on until there is no more to take; raises what a handler raised."""
        try:
            with stopped_by_signals(stop) if stop_on_signals else contextlib.nullcontext():
                if self._workers == 1:
                    self._run_alone()
                else:
                    self._run_beside()
        finally:
            self._executor.close()
        if self._error is not None:
            raise self._error

    def _run_alone(self) -> None:
        while self._error is None and (taken := self._take()) is not None:
            self._handle(*taken)

    def _run_beside(self) -> None:
        workers = [spawn(f"worker-{number}", self._work) for number in range(self._workers)]
        try:
            while self._error is None and (taken := self._take()) is not None:
                self._queue(*taken)
        finally:
            with self._monitor.guard:
                self._no_more = True
                self._monitor.notify()
            for worker in workers:
                worker.join()

    def _queue(self, reader: PartitionReader, batch: ReceivedBatch) -> None:
        with self._monitor.guard:
            while self._queued >= _BATCHES_A_WORKER * self._workers and self._error is None:
                self._monitor.wait()
            self._queued += 1
            if reader in self._queues:
                self._queues[reader].append(batch)
            else:
                self._queues[reader] = deque([batch])
                self._free.append(reader)
            self._monitor.notify()

    def _work(self) -> None:
        while True:
            with self._monitor.guard:
                while not self._free:
                    if self._no_more and not self._queues:
                        return
                    self._monitor.wait()
                reader = self._free.popleft()
                batch = self._queues[reader].popleft()
            self._handle(reader, batch)
            with self._monitor.guard:
                self._queued -= 1
                if self._queues[reader]:
                    self._free.append(reader)
                else:
                    del self._queues[reader]
                self._monitor.notify()

    def _handle(self, reader: PartitionReader, batch: ReceivedBatch) -> None:
        """Handle the messages of a batch, as far as it is still ours to do and nothing has ended the run."""
        done = reader.handed
        messages = self._deserializer.messages(batch)
        message: Received | None = None
        while True:
            if reader.gone or self._fetcher.stopped or self._error is not None:
                break
            try:
                message = next(messages, None)
                if message is None:
                    done = batch.next_offset
                    break
                reader.handed = message.offset + 1
                self._executor.call(self._handler, message)
            except CannotDeserialize as error:
                if not self._forgiven(error.message, error):
                    break
            except Exception as error:  # noqa: BLE001  # whatever a handler raises ends the run, or is told
                if message is None or not self._forgiven(message, error):
                    break
            done = self._progress(reader)
        reader.handed = max(done, reader.done)
        self._ended(reader, done)

    def _progress(self, reader: PartitionReader) -> int:
        if self._auto_commit:
            reader.done = max(reader.done, reader.handed)
        return reader.handed

    def _forgiven(self, message: Received, error: Exception) -> bool:
        """Whether to go on after an error."""
        if self._on_error == "skip":
            logger.error(
                "message %s of %s[%s] was not handled", message.offset, message.topic, message.partition, exc_info=error
            )
            return True
        if callable(self._on_error):
            try:
                self._on_error(message, error)
            except Exception as worse:  # noqa: BLE001  # raised at the end of the run
                error = worse
            else:
                return True
        with self._monitor.guard:
            self._error = self._error or error
            self._fetcher.stop()
            self._monitor.notify()
        return False
