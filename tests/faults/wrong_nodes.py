"""Nodes that break a rule of the replicated disk, to show that the fault tests find it. Only tests start them."""

import threading
from typing import Any

from tests.faults.cluster_processes import serve_node

from headrace.broker.commit_gate import CommitGate
from headrace.storage.replicated.wal import PendingObject, PutOutcome
from headrace.storage.replicated.writer import WalWriter

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
    serve_node(namespace, environment, arguments)


def serve_ungated(namespace: str, environment: dict[str, str], arguments: list[str]) -> None:
    """Answer before what was answered is committed, as a plain broker does."""
    setattr(CommitGate, "answer", staticmethod(lambda outcome: outcome))  # noqa: B010
    setattr(CommitGate, "pushing", staticmethod(lambda push: push))  # noqa: B010
    serve_node(namespace, environment, arguments)
