"""Rules for released messages: which may be tried again, and when; and answers that wait for several others."""

from collections.abc import Sequence
from typing import Any

from crc32c import crc32c

from headrace.broker.pending_answer import PendingAnswer
from headrace.engines.api import LeasedPartition
from headrace.model.errors import HeadraceError
from headrace.model.leasing import Release
from headrace.model.request import AnswerType
from headrace.model.subscription import SubscriptionSettings


def divided(
    settings: SubscriptionSettings, index: LeasedPartition, offsets: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Those that can be tried again, and those that have been tried often enough."""
    most = settings.deliveries_max
    if not most:
        return list(offsets), []
    tried = [failed + 1 for failed in index.failures(offsets)]
    back = [offset for offset, times in zip(offsets, tried, strict=True) if times < most]
    return back, [offset for offset, times in zip(offsets, tried, strict=True) if times >= most]


def rest_until(
    settings: SubscriptionSettings, index: LeasedPartition, offsets: list[int], request: Release, now_us: int
) -> list[int]:
    """When each of the released messages can be leased again."""
    if request.until_us is not None:
        return [request.until_us] * len(offsets)
    if request.delay_ms is not None:
        return [now_us + request.delay_ms * 1000] * len(offsets)
    if request.undelivered:
        return [now_us] * len(offsets)
    failures = index.failures(offsets)
    return [
        now_us + settings.retry_us(failed + 1, _luck(offset, failed))
        for offset, failed in zip(offsets, failures, strict=True)
    ]


def all_of(
    answer: AnswerType | PendingAnswer[AnswerType], others: list[PendingAnswer[Any]]
) -> AnswerType | PendingAnswer[AnswerType]:
    """The answer, when the others are there too."""
    for other in others:
        answer = _both(answer, other)
    return answer


def _both(first: AnswerType | PendingAnswer[AnswerType], second: PendingAnswer[Any]) -> PendingAnswer[AnswerType]:
    """The first answer when both are there, or an error of either."""
    both: PendingAnswer[AnswerType] = PendingAnswer()

    def then(outcome: object) -> None:
        if isinstance(outcome, HeadraceError):
            both.resolve(outcome)
        elif isinstance(first, PendingAnswer):
            first.then(both.resolve)
        else:
            both.resolve(first)

    second.then(then)
    return both


def _luck(offset: int, failed: int) -> float:
    """A number from 0 to 1 that looks random and is always the same for the same attempt."""
    return crc32c(b"%d %d" % (offset, failed)) / 0xFFFFFFFF
