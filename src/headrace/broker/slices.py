"""Long work in slices: the broker serves other requests between two of them."""

import logging
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.engines.api import as_headrace_error
from headrace.model.errors import HeadraceError, InternalError

logger = logging.getLogger("headrace.broker")

TimedSteps = Generator[None, int, Any]
"""As Steps, with `yield` returning the broker's time."""
Steps = Generator[None, None, Any]
"""Yields after each slice of about a millisecond; returns the answer, or a PendingAnswer."""


def run_at_once(steps: TimedSteps, now_us: int) -> None:
    """Run all slices one after the other, at the same time; for the broker's start, when nobody else waits."""
    with suppress(StopIteration):
        next(steps)
        while True:
            steps.send(now_us)


def in_slices(ports: Ports, steps: Steps) -> PendingAnswer[Any]:
    """Run the first slice now and one more at the end of each turn; resolves with what the steps return or raise."""
    return run_slices(ports, steps.__next__)


def run_slices(ports: Ports, resume: Callable[[], None]) -> PendingAnswer[Any]:
    """Call `resume` now and at the end of each turn, until it raises StopIteration or an error."""
    pending_answer: PendingAnswer[Any] = PendingAnswer()

    def run_slice() -> None:
        try:
            resume()
        except StopIteration as ended:
            if isinstance(ended.value, PendingAnswer):
                ended.value.then(pending_answer.resolve)
            else:
                pending_answer.resolve(ended.value)
        except HeadraceError as error:
            pending_answer.resolve(error)
        except OSError as error:
            pending_answer.resolve(as_headrace_error(error))
        except Exception:
            logger.exception("work in slices failed")
            pending_answer.resolve(InternalError())
        else:
            ports.call_at_turn_end(run_slice)  # not soon: several of those are done in one turn

    run_slice()
    return pending_answer
