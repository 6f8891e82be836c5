"""A process that receives the messages that this one publishes, and reports when each arrived."""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from headrace.bench import processes
from headrace.bench.measure import WrongResult

_PATIENCE_S = 30.0


class Arrived(NamedTuple):
    """Messages in the order of their arrival."""

    times_ns: Sequence[int]
    """Of the monotonic clock, which all processes share."""
    values: Sequence[bytes]


Receive = Callable[[str, int, Callable[[], None]], Arrived]
"""Receives so many messages of a topic; calls back once it will get all that is published from then on."""


class Receiver:
    """Another process that receives, for as long as it is needed."""

    def __init__(self, receive: Receive) -> None:
        self._results, theirs = processes.spawn.Pipe()
        self._process = processes.start(_serve, theirs, receive)
        theirs.close()

    @contextlib.contextmanager
    def receiving(self, topic: str, count: int) -> Iterator[Callable[[], Arrived]]:
        """Have it listen meanwhile; what is given waits for the last message and returns them all."""
        self._results.send((topic, count))
        self._answer()
        yield self._answer

    def _answer(self) -> Any:
        if not self._results.poll(_PATIENCE_S):
            raise WrongResult(f"the process that receives said nothing for {_PATIENCE_S:g} s")
        try:
            answer = self._results.recv()
        except EOFError:
            raise WrongResult("the process that receives ended without an answer") from None
        if isinstance(answer, str):
            raise WrongResult(f"the process that receives failed: {answer}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._results.close()


def _serve(results: Connection, receive: Receive) -> None:
    """In the other process: receive messages for each request."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            topic, count = results.recv()
            try:
                results.send(receive(topic, count, lambda: results.send(None)))
            except Exception:  # noqa: BLE001
                # Whatever it is, the other side has to be told.
                results.send(traceback.format_exc())
