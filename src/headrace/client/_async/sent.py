"""What `send` gives back: a way to ask what became of messages."""

from collections.abc import Sequence

from headrace.client._async.concurrency import Pending, now
from headrace.client.outgoing import Parcel
from headrace.client.results import Receipt, merged, receipt_at
from headrace.model.arguments import checked_timeout
from headrace.model.describing import described, state_of


class AsyncSent(Pending):
    """A message on its way."""

    __slots__ = ("_asked", "_parcel", "_place")

    def __init__(self, parcel: Parcel, place: int) -> None:
        self._parcel = parcel
        self._place = place
        self._asked = False

    def __repr__(self) -> str:
        return described(self, lambda: [_decided([self._parcel])])

    @property
    def done(self) -> bool:
        """Whether it is decided."""
        return self._parcel.outcome.done

    async def result(self, timeout: float | None = None) -> Receipt:
        """The receipt, as soon as there is one; raises what went wrong.

        Parameters:
            timeout: how many seconds to wait; by default as long as the producer tries.
        """
        if timeout is not None:
            timeout = checked_timeout(timeout)
        if not self._asked:
            self._asked = True
            self._parcel.observed += 1
        self._parcel.check_process()
        receipt: Receipt = await self._parcel.outcome.wait(timeout)
        return receipt_at(receipt, self._place)


class AsyncSentMany(Pending):
    """Messages on their way, in as many batches as they needed."""

    __slots__ = ("_parcels",)

    def __init__(self, parcels: Sequence[Parcel]) -> None:
        self._parcels = parcels

    def __repr__(self) -> str:
        return described(self, lambda: [f"batches={len(self._parcels)}", _decided(self._parcels)])

    @property
    def done(self) -> bool:
        """Whether all of it is decided."""
        return all(parcel.outcome.done for parcel in self._parcels)

    async def result(self, timeout: float | None = None) -> list[Receipt]:
        """A receipt for each partition that got messages, or several where other messages came between.

        Parameters:
            timeout: how many seconds to wait; by default as long as the producer tries.
        """
        if timeout is not None:
            timeout = checked_timeout(timeout)
        deadline = None if timeout is None else now() + timeout
        for parcel in self._parcels:
            parcel.observed = parcel.count
            parcel.check_process()
        if len(self._parcels) == 1:
            return [await self._parcels[0].outcome.wait(timeout)]
        return merged(
            [await parcel.outcome.wait(None if deadline is None else deadline - now()) for parcel in self._parcels]
        )


def _decided(parcels: Sequence[Parcel]) -> str:
    outcomes = [parcel.outcome for parcel in parcels]
    failed = any(outcome.error is not None for outcome in outcomes)
    return state_of(failed=failed, acknowledged=all(outcome.done for outcome in outcomes), on_its_way=True)
