"""The receipt of an append: the offsets of its messages, and the durability that they have reached by now."""

from typing import TYPE_CHECKING

from headrace.model.durability import Durability
from headrace.model.errors import DurabilityUnavailable

if TYPE_CHECKING:
    from headrace.storage.stored_log import StoredLog


class AppendReceipt:
    """The receipt of one append."""

    __slots__ = ("_log", "base_offset", "next_offset")

    def __init__(self, log: "StoredLog", base_offset: int, next_offset: int) -> None:
        self._log = log
        self.base_offset = base_offset
        self.next_offset = next_offset

    @property
    def reached(self) -> Durability:
        """The durability of the messages now."""
        return self._log.reached(self.next_offset)

    def wait(self, durability: Durability, timeout_s: float | None = None) -> None:
        """Return when the messages have this durability; raises DurabilityUnavailable if they never will."""
        if self._log.append_durability >= durability:
            return
        if not self._log.durable:
            raise DurabilityUnavailable
        self._log.wait_synced(self.next_offset, timeout_s)
