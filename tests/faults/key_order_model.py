"""The order of a key, as docs/reference/subscriptions.md defines it, in the fewest words: a list, looked through."""

from dataclasses import dataclass, field
from typing import Any

LEASE_US = 5_000_000


@dataclass
class Message:
    """A message that is not settled."""

    offset: int
    key: bytes | None
    published_us: int
    due_us: int
    priority: int
    expires_us: int | None
    tried: bool = False
    """Whether it was handed out in vain."""
    rests_us: int = 0
    until_us: int = 0
    """The end of its lease; 0 when nobody holds it."""
    holding: Any = None


@dataclass
class Model:
    """A subscription with one partition."""

    discipline: str = "fifo"
    ordered_by_key: bool = True
    messages: list[Message] = field(default_factory=list)

    def pass_time(self, now_us: int) -> None:
        """Leases end, and what nobody holds expires."""
        for message in self.messages:
            if message.until_us and message.until_us <= now_us:
                self.come_back(message, counted=True, rests_us=0)
        self.messages = [
            one for one in self.messages if one.until_us or one.expires_us is None or one.expires_us > now_us
        ]

    def come_back(self, message: Message, *, counted: bool, rests_us: int) -> None:
        message.until_us, message.holding = 0, None
        message.tried = message.tried or counted
        message.rests_us = max(rests_us, message.due_us)

    def may_have_key(self, message: Message, now_us: int) -> bool:
        """The definition."""
        if not self.ordered_by_key or message.key is None:
            return True
        same = [one for one in self.messages if one.key == message.key]
        if any(one.until_us for one in same):
            return False
        tried = [one.offset for one in same if one.tried and one.due_us <= now_us]
        return not tried or message.offset == min(tried)

    def next(self, now_us: int, ahead_us: int) -> Message | None:
        """What is handed out next: what is ready by the discipline, then what is due soon."""
        free = [
            one
            for one in self.messages
            if not one.until_us and one.rests_us <= now_us and self.may_have_key(one, now_us)
        ]
        ready = [one for one in free if one.due_us <= now_us]
        if ready:
            return min(ready, key=self.rank)
        soon = [one for one in free if one.due_us <= now_us + ahead_us]
        return min(soon, key=lambda one: one.due_us) if soon else None

    def rank(self, one: Message) -> tuple[int, int]:
        rank = {"fifo": 0, "lifo": -one.offset, "priority": -one.priority, "deadline": one.due_us}[self.discipline]
        return rank, one.offset

    def lease(self, count: int, now_us: int, ahead_us: int) -> list[int]:
        """Hand out up to so many together; a lease does not begin before the message is due."""
        taken: list[int] = []
        while len(taken) < count and (following := self.next(now_us, ahead_us)) is not None:
            following.until_us = max(now_us, following.due_us) + LEASE_US
            taken.append(following.offset)
        return taken
