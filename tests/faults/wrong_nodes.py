"""Nodes that break a rule of the replicated disk, to show that the fault tests find it. Only tests start them.

An owner whose epoch is unconfirmed refuses requests long before it meets a seal, and one that sees another epoch in the
manifest stops. That hides the mistakes of a node which breaks a rule only then, so such nodes break these as well.
"""

import threading
from typing import Any

from tests.faults.cluster_processes import serve_node

from headrace.broker.commit_gate import CommitGate
from headrace.cluster import node
from headrace.cluster.claims import OwnerView, ServeOn, StopServing
from headrace.cluster.ownership import Ownership
from headrace.storage.replicated.wal import PendingObject, PutOutcome
from headrace.storage.replicated.writer import WalWriter

_LATE_US = 1_500_000
_EARLY_S = 0.05
"""How long before an object is in the store it is acknowledged."""


def serve_early(namespace: str, environment: dict[str, str], arguments: list[str]) -> None:
    """Acknowledge what is on its way to the store, and not yet there."""
    put: Any = WalWriter._attempt

    def attempt(writer: WalWriter, pending: PendingObject, data: bytes) -> PutOutcome:
        threading.Timer(_EARLY_S, put, (writer, pending, data)).start()
        return PutOutcome.COMMITTED

    setattr(WalWriter, "_attempt", attempt)  # noqa: B010
    serve_node(namespace, environment, arguments)


def serve_unfenced(namespace: str, environment: dict[str, str], arguments: list[str]) -> None:
    """Take the seal of another node for an object of one's own."""

    def look(writer: WalWriter, position: int, key: str) -> PutOutcome:
        del writer, position, key
        return PutOutcome.COMMITTED

    setattr(WalWriter, "_look", look)  # noqa: B010
    _serve_unconfirmed()
    _serve_on()
    serve_node(namespace, environment, arguments)


def serve_ungated(namespace: str, environment: dict[str, str], arguments: list[str]) -> None:
    """Answer before what was answered is committed, as a plain broker does."""
    setattr(CommitGate, "answer", staticmethod(lambda outcome: outcome))  # noqa: B010
    setattr(CommitGate, "pushing", staticmethod(lambda push: push))  # noqa: B010
    _serve_unconfirmed()
    serve_node(namespace, environment, arguments)


def _serve_on() -> None:
    """Serve on for a while after another node was seen to have claimed the shard."""
    decide, first_us = node.decide_owner, dict[int, int]()

    def decide_late(view: OwnerView, now_us: int) -> ServeOn | StopServing:
        decision = decide(view, now_us)
        if isinstance(decision, StopServing) and now_us - first_us.setdefault(view.epoch, now_us) < _LATE_US:
            return ServeOn(now_us + _LATE_US // 10)
        return decision

    setattr(node, "decide_owner", decide_late)  # noqa: B010


def _serve_unconfirmed() -> None:
    """Take requests also while another node may have replaced this one."""
    setattr(Ownership, "is_unconfirmed", lambda _self, _longest_us: False)  # noqa: B010
