"""Long work in slices: the broker serves other requests between two of them."""

import logging
from collections.abc import Generator
from typing import Any

from headrace.broker.later import Later
from headrace.broker.ports import Ports
from headrace.engines.api import explained
from headrace.model.errors import HeadraceError, InternalError

logger = logging.getLogger("headrace.broker")

Steps = Generator[None, None, Any]
"""Yields after each slice of about a millisecond; returns the answer, or a Later."""


def in_slices(ports: Ports, steps: Steps) -> Later[Any]:
    """Run the first slice now, the others one by one in turns that follow; settles with what they return or raise."""
    later: Later[Any] = Later()

    def run_slice() -> None:
        try:
            next(steps)
        except StopIteration as ended:
            if isinstance(ended.value, Later):
                ended.value.then(later.settle)
            else:
                later.settle(ended.value)
        except HeadraceError as error:
            later.settle(error)
        except OSError as error:
            later.settle(explained(error))
        except Exception:
            logger.exception("work in slices failed")
            later.settle(InternalError())
        else:
            ports.last(run_slice)  # not soon: several of those are called in one turn

    run_slice()
    return later
