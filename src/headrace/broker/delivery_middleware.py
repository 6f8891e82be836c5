"""Passes messages through the middleware of their topic when they are delivered, and hides those for which it fails."""

import logging
from collections.abc import Sequence

import msgspec

from headrace.broker.middleware_chain import MiddlewareStep, call_step, check_returned, failure
from headrace.engines.api import DerivedPart
from headrace.model.batch import Columns, message_sizes
from headrace.model.errors import MiddlewareFailed
from headrace.model.limits import MESSAGE_BYTES_MAX
from headrace.model.middleware import ERROR_HEADER, MiddlewareContext

logger = logging.getLogger("headrace.broker")

_BYTES_MAX = 8 << 20
"""What the messages that are delivered together have at most, if they are more than one."""


class DeliveryMiddleware:
    """The middleware of a topic that changes what is delivered of a partition: values and headers, nothing else."""

    def __init__(self, steps: Sequence[MiddlewareStep], context: MiddlewareContext) -> None:
        self._steps = steps
        self._context = context
        self._logged = False

    def derive(self, columns: Columns, start: int, stop: int) -> DerivedPart:
        """Change the messages of a part of a batch; fewer than these if they become large."""
        given = columns.picked(range(start, stop), range(len(columns.values)))
        given.places = given.origins = None
        made = self.delivered(given)
        sizes = message_sizes(made)
        if sum(sizes) > _BYTES_MAX:
            stop = start + _fitting(sizes)
            made = made.picked(range(stop - start), range(len(sizes)))
            made.places = None
        return DerivedPart(range(start, stop), stop, (), made)

    def delivered(self, columns: Columns) -> Columns:
        """Change messages; one for which a middleware fails has no value, and only a header that says so."""
        try:
            return self._changed(columns)
        except MiddlewareFailed as error:
            if len(columns.values) == 1:
                return self._hidden(columns, error)
        values, headers = list(columns.values), list(columns.headers or [None] * len(columns.values))
        for index in range(len(values)):
            one = columns.picked([index], range(len(values)))
            one.places = None
            made = self.delivered(one)
            values[index], headers[index] = made.values[0], None if made.headers is None else made.headers[0]
        return msgspec.structs.replace(columns, values=values, headers=headers)

    def _changed(self, columns: Columns) -> Columns:
        for step in self._steps:
            assert step.on_deliver is not None
            outcome = call_step(step, step.on_deliver, columns, self._context)
            made = check_returned(step, outcome, columns, self._context)
            columns = msgspec.structs.replace(columns, values=made.values, headers=made.headers)
        if max(message_sizes(columns), default=0) > MESSAGE_BYTES_MAX:
            raise failure(self._steps[-1].name, self._context, "made a message too large")
        return columns

    def _hidden(self, columns: Columns, error: MiddlewareFailed) -> Columns:
        name = str(error.details.get("middleware", ""))
        if not self._logged:
            self._logged = True
            where = self._context.tenant, self._context.topic
            text = "middleware failed at delivery, logged once  tenant=%s topic=%s"
            logger.error(text + " reason=%s", *where, error)
        return msgspec.structs.replace(columns, values=[None], headers=[{ERROR_HEADER: name.encode()}])


def _fitting(sizes: Sequence[int]) -> int:
    """How many messages fit into the limit, at least one."""
    total = 0
    for index, size in enumerate(sizes):
        total += size
        if index and total > _BYTES_MAX:
            return index
    return len(sizes)
