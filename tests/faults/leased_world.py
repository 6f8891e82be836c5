"""Leased subscriptions as plain as can be: dictionaries that are looked through from one end to the other."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.model.leasing import OWNER_HEADER, Selection
from headrace.model.limits import DELIVERIES_MAX
from headrace.model.subscription import Discipline, Expired, SubscriptionSettings

Id = tuple[int, int]
"""Partition and offset."""


@dataclass
class Message:
    """A message as it is now; nothing in it is changed in place."""

    id: Id
    time_us: int
    value: bytes
    key: bytes | None = None
    headers: dict[str, bytes] = field(default_factory=dict)
    due_us: int | None = None
    priority: int | None = None
    expires_us: int | None = None
    version: int = 1
    deleted: bool = False
    only: str = ""
    """The one subscription that it is for."""

    @property
    def owner(self) -> str:
        return self.headers.get(OWNER_HEADER, b"").decode()

    @property
    def size(self) -> int:
        headers = sum(len(name) + len(value) for name, value in self.headers.items())
        return len(self.value) + len(self.key or b"") + headers


@dataclass
class Entry:
    """How a subscription has a message."""

    fate: str = "pending"
    """Or done, dead, redriven."""
    deliveries: int = 0
    rests_us: int = 0
    token: int = 0
    """Of the last lease, which may be over; 0 when it was given back."""
    holder: str = ""
    until_us: int = 0
    state: bytes | None = None
    reason: str = ""
    doubtful: bool = False
    """A power loss may have taken its last lease back, or not: the token and the state are not known."""

    def leased(self, now_us: int) -> bool:
        return self.fate == "pending" and self.token != 0 and now_us < self.until_us


@dataclass
class Subscription:
    """A subscription: its settings, and all messages that it ever had."""

    name: str
    settings: SubscriptionSettings
    entries: dict[Id, Entry] = field(default_factory=dict)

    def copy(self) -> "Subscription":
        return Subscription(self.name, self.settings, {at: replace(entry) for at, entry in self.entries.items()})


@dataclass
class World:
    """All messages of a topic, and its subscriptions."""

    messages: dict[Id, Message] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)

    def copy(self) -> "World":
        return World(dict(self.messages), {name: one.copy() for name, one in self.subscriptions.items()})

    def add(self, message: Message) -> None:
        """A message was published."""
        self.messages[message.id] = message
        for one in self.subscriptions.values():
            if message.only in ("", one.name):
                one.entries[message.id] = Entry()

    def subscribe(self, name: str, settings: SubscriptionSettings, *, earliest: bool) -> None:
        """A new subscription has all messages there are, or none of them."""
        made = self.subscriptions[name] = Subscription(name, settings)
        if earliest:
            for message in self.messages.values():
                if not message.deleted and message.only in ("", name):
                    made.entries[message.id] = Entry()

    def ready_us(self, at: Id, entry: Entry) -> int:
        """When a message that is not leased can be handed out."""
        message = self.messages[at]
        due_us = message.due_us if message.due_us is not None else message.time_us
        return max(due_us, entry.rests_us)

    def stale(self, at: Id, now_us: int) -> bool:
        """Whether it has expired, and may be dropped at any moment."""
        expires_us = self.messages[at].expires_us
        return expires_us is not None and expires_us <= now_us

    def status(self, at: Id, entry: Entry, now_us: int) -> str:
        if entry.fate != "pending":
            return entry.fate
        if entry.leased(now_us):
            return "leased"
        return "waiting" if self.ready_us(at, entry) > now_us else "ready"

    def pending(self, name: str) -> Iterator[tuple[Id, Entry]]:
        """What a subscription has not settled."""
        for at, entry in sorted(self.subscriptions[name].entries.items()):
            if entry.fate == "pending":
                yield at, entry

    # What time does.

    def pass_time(self, now_us: int) -> int:
        """Leases end; returns how many."""
        ended = 0
        for one in self.subscriptions.values():
            for at, entry in one.entries.items():
                if entry.fate == "pending" and entry.token and entry.until_us <= now_us and entry.holder:
                    ended += 1
                    self.give_back(one, at, "", entry.until_us)
        return ended

    def give_back(self, one: Subscription, at: Id, reason: str, rests_us: int) -> None:
        """After a delivery in vain; the last one was the last."""
        entry = one.entries[at]
        most = one.settings.deliveries_max
        if most and entry.deliveries >= most:
            entry.fate = "dead"
        entry.holder = ""
        entry.rests_us = rests_us
        if reason:
            entry.reason = reason

    # Leases.

    def eligible(self, name: str, now_us: int, ahead_us: int) -> list[Id]:
        """What may be handed out, in no order."""
        one = self.subscriptions[name]
        if one.settings.paused:
            return []
        found = [
            at
            for at, entry in self.pending(name)
            if not entry.leased(now_us)
            and self.ready_us(at, entry) <= now_us + ahead_us
            and entry.rests_us <= now_us
            and not self.stale(at, now_us)
        ]
        return [at for at in found if self.may_have_key(name, at, now_us)] if one.settings.ordered_by_key else found

    def may_have_key(self, name: str, at: Id, now_us: int) -> bool:
        """Whether its key is not held by another message: one in hand, or else the oldest of those tried before."""
        key = self.messages[at].key
        same = [(other, entry) for other, entry in self.pending(name) if self.messages[other].key == key]
        if key is None:
            return True
        if any(entry.leased(now_us) for _, entry in same):
            return False
        tried = [
            other
            for other, entry in same
            if entry.deliveries and self.due_us(other) <= now_us and not self.stale(other, now_us)
        ]
        return not tried or at == min(tried)

    def may_wait(self, name: str, at: Id, now_us: int) -> bool:
        """Whether it need not be handed out ahead: it was before, and given back."""
        entry = self.subscriptions[name].entries[at]
        return bool(entry.rests_us) and self.due_us(at) > now_us

    def first(self, name: str, eligible: list[Id], now_us: int) -> list[Id]:
        """Those among which it does not matter which one is handed out next; what is ready comes before what is not."""
        ready = [at for at in eligible if self.ready_us(at, self.subscriptions[name].entries[at]) <= now_us]
        if not ready:
            return eligible
        discipline = self.subscriptions[name].settings.discipline
        if discipline is Discipline.PRIORITY:
            most = max(self.messages[at].priority or 0 for at in ready)
            ready = [at for at in ready if (self.messages[at].priority or 0) == most]
        elif discipline is Discipline.DEADLINE:
            soonest = min(self.due_us(at) for at in ready)
            return [at for at in ready if self.due_us(at) == soonest]
        heads: dict[int, Id] = {}
        for at in sorted(ready, reverse=discipline is not Discipline.LIFO):
            heads[at[0]] = at
        return list(heads.values())

    def due_us(self, at: Id) -> int:
        message = self.messages[at]
        return message.time_us if message.due_us is None else message.due_us

    def hand_out(self, name: str, at: Id, token: int, holder: str, until_us: int) -> None:
        entry = self.subscriptions[name].entries[at]
        entry.deliveries = min(entry.deliveries + 1, DELIVERIES_MAX)
        entry.token, entry.holder, entry.until_us = token, holder, until_us

    def refusals(self, name: str, at: Id, token: int, now_us: int, *, ack: bool) -> set[str]:
        """With which codes something about a message may be refused; none: it must not be."""
        entry = self.subscriptions[name].entries.get(at)
        if entry is not None and entry.fate == "dead":
            return {"message_gone", "not_lease_holder"}  # the second while it is on its way
        if entry is None or entry.fate != "pending":
            return {"message_gone"}
        leaving = self.stale(at, now_us) and not entry.leased(now_us)
        if entry.token != token:
            return {"not_lease_holder", "lease_expired"} | ({"message_gone"} if leaving else set())
        if leaving:
            return {"message_gone", "lease_expired", ""}
        if entry.leased(now_us):
            return set()
        return set() if ack else {"lease_expired"}

    # Looking.

    def matches(self, name: str, at: Id, selection: Selection, now_us: int) -> bool | None:
        """Whether a message is selected; None: it is not said."""
        entry, message = self.subscriptions[name].entries[at], self.messages[at]
        status = self.status(at, entry, now_us)
        leaving = self.stale(at, now_us) and status != "leased"
        sure = [
            not selection.status or selection.status == status or leaving,
            selection.key is None or selection.key == message.key,
            not selection.owner or selection.owner == message.owner,
            all(message.headers.get(name) == value for name, value in selection.headers.items()),
            not selection.messages or at in [(one.partition, one.offset) for one in selection.messages],
        ]
        if not all(sure):
            return False
        if leaving:
            return None
        ready_us = self.ready_us(at, entry)
        low, high = selection.due_from_us, selection.due_to_us
        if low is None and high is None:
            return True
        if status != "waiting" and (entry.deliveries or entry.rests_us):
            return None  # since when a message is ready that was given back is not said
        return (low is None or ready_us >= low) and (high is None or ready_us < high)

    # Edits.

    def objections(self, at: Id, version: int | None, owner: str, now_us: int) -> set[str]:
        """Why a message may not be edited."""
        message = self.messages.get(at)
        if message is None or message.deleted:
            return {"message_gone"}
        entries = [one.entries.get(at) for one in self.subscriptions.values()]
        pending = [entry for entry in entries if entry is not None and entry.fate == "pending"]
        found = {"message_leased"} if any(entry.leased(now_us) for entry in pending) else set()
        if self.subscriptions and not pending:
            found.add("message_gone")
        if message.owner not in ("", owner):
            found.add("not_owner")
        if version not in (None, message.version):
            found.add("stale_version")
        return found

    def was_deleted(self, at: Id, version: int | None, owner: str) -> bool:
        """Whether an edit has deleted this version of a message already."""
        message = self.messages.get(at)
        if message is None or not message.deleted or message.owner not in ("", owner):
            return False
        return version in (None, message.version - 1, message.version)

    def shifted_from_us(self, at: Id, now_us: int) -> int:
        """The time that a shift counts from: until when it rests somewhere, or else its own."""
        entries = [one.entries[at] for one in self.subscriptions.values() if at in one.entries]
        rests = [one.rests_us for one in entries if one.fate == "pending" and one.rests_us > now_us]
        return max(self.due_us(at), *rests, 0)

    def edit(self, at: Id, **changes: Any) -> None:
        """Change a message; that makes a new version of it."""
        message = self.messages[at]
        self.messages[at] = replace(message, version=message.version + 1, **changes)
        if "due_us" in changes:
            for one in self.subscriptions.values():
                if at in one.entries:
                    one.entries[at].rests_us = 0  # it was said anew when it is to come
        if self.messages[at].deleted:
            for one in self.subscriptions.values():
                if at in one.entries and one.entries[at].fate == "pending":
                    one.entries[at].fate = "done"


def drops(settings: SubscriptionSettings) -> bool:
    """Whether expired messages just go."""
    return settings.expired is Expired.DROP
