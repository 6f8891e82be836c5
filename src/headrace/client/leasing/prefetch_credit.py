"""Credit of a standing lease request: how many messages the broker may still deliver, and which bytes to give back."""

from collections import deque


class PrefetchCredit:
    """Counts messages and bytes; bytes are given back when as many messages have left the buffer as came with them."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        """What the standing request has in the beginning."""
        self.messages = 0
        """So many the broker may still deliver."""
        self._deliveries: deque[list[int]] = deque()
        """Of each delivery, the oldest first: how many of its messages are in the buffer, and its bytes."""
        self._bytes_left = 0

    def open(self, messages: int) -> None:
        """A standing request begins with this."""
        self.messages = messages
        self._deliveries.clear()
        self._bytes_left = 0

    def delivered(self, messages: int, size_bytes: int) -> None:
        """So much came."""
        self.messages -= messages
        self._deliveries.append([messages, size_bytes])

    def leave(self) -> None:
        """A message has left the buffer."""
        if self._deliveries:
            first = self._deliveries[0]
            first[0] -= 1
            if first[0] <= 0:
                self._bytes_left += first[1]
                self._deliveries.popleft()

    @property
    def owes_bytes(self) -> bool:
        """Whether so many bytes have left the buffer that the broker should be told."""
        return self._bytes_left >= self.bytes_max // 2

    def give(self, messages: int) -> int:
        """Give so many messages more; returns the bytes that go with them."""
        self.messages += messages
        size_bytes, self._bytes_left = self._bytes_left, 0
        return size_bytes
