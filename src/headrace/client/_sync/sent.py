"""What `send` gives back: a way to ask what became of messages."""

from collections.abc import Sequence

from headrace.client._sync.concurrency import Pending, now
from headrace.client.outgoing import Parcel
from headrace.client.results import Receipt, merged, receipt_at


class Sent(Pending):
    """A message on its way."""

    __slots__ = ("_asked", "parcel", "place")

    def __init__(self, parcel: Parcel, place: int) -> None:
        self.parcel = parcel
        self.place = place
        self._asked = False

    @property
    def done(self) -> bool:
        """Whether it is decided."""
        return self.parcel.outcome.done

    def result(self, timeout: float | None = None) -> Receipt:
        """The receipt, as soon as there is one; raises what went wrong.

        Parameters:
            timeout: how many seconds to wait; by default as long as the producer tries.
        """
        if not self._asked:
            self._asked = True
            self.parcel.observed += 1
        self.parcel.check_process()
        receipt: Receipt = self.parcel.outcome.wait(timeout)
        return receipt_at(receipt, self.place)


class SentMany(Pending):
    """Messages on their way, in as many batches as they needed."""

    __slots__ = ("_parcels",)

    def __init__(self, parcels: Sequence[Parcel]) -> None:
        self._parcels = parcels

    @property
    def done(self) -> bool:
        """Whether all of it is decided."""
        return all(parcel.outcome.done for parcel in self._parcels)

    def result(self, timeout: float | None = None) -> list[Receipt]:
        """A receipt for each partition that got messages, or several where other messages came between.

        Parameters:
            timeout: how many seconds to wait; by default as long as the producer tries.
        """
        deadline = None if timeout is None else now() + timeout
        for parcel in self._parcels:
            parcel.observed = parcel.count
            parcel.check_process()
        if len(self._parcels) == 1:
            return [self._parcels[0].outcome.wait(timeout)]
        return merged([parcel.outcome.wait(None if deadline is None else deadline - now()) for parcel in self._parcels])
