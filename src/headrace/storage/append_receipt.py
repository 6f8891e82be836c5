"""What an append is worth: where its messages are, and how safe they are by now."""

from typing import Protocol

from headrace.model.durability import Durability


class SyncableLog(Protocol):
    """A log whose appends become durable by and by."""

    @property
    def synced_offset(self) -> int:
        """All messages before this offset are on the disk."""

    def wait_synced(self, offset: int, timeout_s: float | None = None) -> None:
        """Return when all messages before an offset are on the disk."""


class AppendReceipt:
    """The acknowledgement of one append."""

    __slots__ = ("_at_once", "_log", "base_offset", "next_offset")

    def __init__(self, log: SyncableLog, base_offset: int, next_offset: int, at_once: Durability) -> None:
        self._log = log
        self.base_offset = base_offset
        self.next_offset = next_offset
        self._at_once = at_once

    @property
    def reached(self) -> Durability:
        """How safe the messages are now."""
        return Durability.SYNCED if self._log.synced_offset >= self.next_offset else self._at_once

    def wait(self, durability: Durability, timeout_s: float | None = None) -> None:
        """Return when the messages are that safe."""
        if self._at_once < durability:
            self._log.wait_synced(self.next_offset, timeout_s)
