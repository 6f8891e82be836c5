"""Offsets reserved in the journal before anybody can see them, so that no loss lets them name other messages."""

from collections.abc import Callable
from functools import partial

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.engines.api import as_headrace_error
from headrace.model.errors import HeadraceError
from headrace.model.request import Answer

BLOCK_MIN = 1 << 12
BLOCK_MAX = 1 << 18
"""Offsets reserved at a time: each block is twice the one before, so that a busy partition seldom asks."""

Reserve = Callable[[int], PendingAnswer[Answer]]
"""Records that the offsets before one are reserved; resolves when the record is synced."""


class Reservation:
    """The reserved offsets of one partition. A new block is asked for when half of the last one is used.

    >>> from headrace.testing.workbench import Workbench
    >>> asked: list[int] = []
    >>> answer: PendingAnswer[Answer] = PendingAnswer()
    >>> reservation = Reservation(lambda end: asked.append(end) or answer, 100, Workbench())
    >>> reservation.ask(100, lambda error: print("reserved", reservation.end, error))
    >>> answer.resolve(Answer())
    reserved 4196 None
    >>> asked, reservation.ask_at
    ([4196], 2148)
    """

    def __init__(self, reserve: Reserve, end: int, ports: Ports) -> None:
        self._reserve = reserve
        self._ports = ports
        self._block = BLOCK_MIN
        self.end = end
        """Offsets before this one are never given to another message, even after a loss."""
        self.ask_at = end - BLOCK_MIN // 2
        """The offset beyond which another block is requested."""
        self.asked = False
        """Whether a block is being reserved."""

    def ask(self, next_offset: int, tell: Callable[[HeadraceError | None], None]) -> None:
        """Reserve a block behind an offset; calls back later, with the error if that failed."""
        told = partial(self._told, next_offset, tell)
        self.asked = True
        try:
            self._reserve(next_offset + self._block).then(told)
        except HeadraceError as error:
            self._ports.call_soon(partial(told, error))
        except OSError as error:
            self._ports.call_soon(partial(told, as_headrace_error(error)))
        except BaseException:
            self.asked = False
            raise

    def _told(self, next_offset: int, tell: Callable[[HeadraceError | None], None], outcome: object) -> None:
        self.asked = False
        if isinstance(outcome, HeadraceError):
            tell(outcome)
            return
        self.end = next_offset + self._block
        self.ask_at = self.end - self._block // 2
        self._block = min(2 * self._block, BLOCK_MAX)
        tell(None)
