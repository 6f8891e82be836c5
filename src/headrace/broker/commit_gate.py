"""The commit gate of a node of a cluster: nothing that was only written leaves the broker.

A plain broker may tell of a fact that is written and not yet synced: a power loss that takes it back takes the broker's
connections with it, and a killed process takes nothing back. A node of a cluster can lose its shard between the two,
while its clients still hear it: they would get leases, offsets and names that the next owner never heard of. So answers
and pushes wait here until the journal, as far as it was recorded when they were decided, is committed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.model.cluster_errors import IN_DOUBT_TEXT, Fenced, NotServing
from headrace.model.errors import Cancelled, HeadraceError
from headrace.model.request import Request

Push = Callable[[Any], None]


class HeldAnswer(PendingAnswer[Any]):
    """An answer that waits for the journal. Cancelling it withdraws the request, as long as that is not answered."""

    __slots__ = ("_withdraw",)

    def __init__(self, withdraw: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self._withdraw = withdraw

    def cancel(self) -> bool:
        """Withdraw the request; whether it was still to be answered. What it did already, such as a lease, is told."""
        return self._withdraw is not None and self._withdraw()


class CommitGate:
    """Holds answers and pushes back until all that was recorded before them is committed."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def answer(self, outcome: Any) -> Any:
        """The outcome of a request: at once if everything is committed, else an answer to come."""
        if not isinstance(outcome, PendingAnswer):
            return self._direct(outcome)
        if outcome.is_committed:
            return outcome
        held = HeldAnswer(outcome.cancel)
        outcome.then(partial(self._hold, held))
        return held

    def refuse(self, request: Request[Any], error: HeadraceError) -> Any:
        """The refusal of a request, which tells of recorded facts, too: raises it, or returns an answer to come."""
        outcome = self._direct(error) if request.declared.awaits_commit else error
        if outcome is error:
            raise as_in_doubt(error)
        return outcome

    def pushing(self, push: Push) -> Push:
        """A function that pushes to a session what may leave, in the order in which it was decided."""

        def push_committed(pushed: Any) -> None:
            told = pushed.answer if isinstance(pushed, AnswerWithBody) else pushed
            if not told.awaits_commit:
                push(pushed)
                return

            def tell(error: HeadraceError | None) -> None:
                if error is None:  # else the session ends with the node: what it was not told did not happen
                    push(pushed)

            self._ledger.when_committed(tell)

        return push_committed

    def _direct(self, outcome: Any) -> Any:
        if self._ledger.is_committed:
            return outcome
        held = HeldAnswer()
        self._hold(held, outcome)
        return held

    def _hold(self, held: HeldAnswer, outcome: Any) -> None:
        """Resolve an answer when what it tells is committed; whoever has cancelled it need not wait."""
        if isinstance(outcome, Cancelled):
            held.resolve(outcome)
            return

        def tell(error: HeadraceError | None) -> None:
            told = outcome if error is None else error
            held.resolve(as_in_doubt(told) if isinstance(told, HeadraceError) else told)

        self._ledger.when_committed(tell)


def as_in_doubt(error: HeadraceError) -> HeadraceError:
    """The error as clients get it, after a handler has begun: it may have written before it met that the shard is lost.

    What is written may be in the store, although the store has not answered. Only a request that met no handler gets
    NotServing, which clients take for "nothing was done".
    """
    if not isinstance(error, Fenced | NotServing):
        return error
    return Fenced(f"another node of the cluster takes over: {IN_DOUBT_TEXT}")
