"""Out of what the model of a broker chooses: settings, messages, changes, and what is picked among them."""

from typing import Any

from hypothesis import strategies as st
from tests.faults.leased_counting import Counting
from tests.faults.leased_world import Id, Message

from headrace.model.leasing import OWNER_HEADER, MessageChange, Selection

SECOND_US = 1_000_000
ANY = st.integers(0, 11)
SUBSCRIPTIONS = st.sampled_from(["default", "default", "other"])
HOLDERS = st.sampled_from(["ann", "bob"])
OWNERS = st.sampled_from(["", "shop", "else"])
WHEN = st.none() | st.sampled_from([-5.0, 0.0, 0.001, 1.0, 3.0, 60.0])
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "discipline": st.sampled_from(["fifo", "lifo", "priority", "deadline"]),
        "lease_seconds": st.sampled_from([2.0, 30.0]),
        "deliveries_max": st.sampled_from([0, 1, 2, 3]),
        "expired": st.sampled_from(["drop", "dead"]),
        "rejected": st.sampled_from(["dead", "dead", "drop"]),
        "retry": st.sampled_from(["fixed", "linear", "exponential"]),
        "retry_seconds": st.sampled_from([0.0, 1.0, 4.0]),
        "retry_seconds_max": st.sampled_from([4.0, 10.0]),
        "ordered_by_key": st.booleans(),
        "paused": st.sampled_from([False] * 7 + [True]),
    },
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "key": st.sampled_from([b"red", b"blue"]),
        "owner": OWNERS,
        "due": st.sampled_from([None, None, None, -5.0, 0.0, 0.001, 1.0, 3.0, 60.0]),
        "priority": st.sampled_from([0, 1, 1, 7, -3]),
        "expires": st.sampled_from([None] * 6 + [1.0, 20.0]),
    },
)
CHANGES = st.one_of(
    st.builds(lambda seconds: ("move", seconds), st.sampled_from([-5.0, 0.0, 0.5, 3.0, 60.0])),
    st.builds(lambda seconds: ("shift", seconds), st.sampled_from([-2.0, 1.0, 60.0])),
    st.builds(lambda priority: ("priority", priority), st.sampled_from([0, 1, 9])),
    st.sampled_from([("replace", 0), ("delete", 0)]),
)
SELECTIONS = st.fixed_dictionaries(
    {},
    optional={
        "status": st.sampled_from(["", "waiting", "ready", "leased"]),
        "key": st.sampled_from([b"red", b"green"]),
        "owner": OWNERS,
        "low": WHEN,
        "high": WHEN,
    },
)


class Choices(Counting):
    """Makes of what was chosen what is asked for."""

    def message(self, number: int, value: bytes, about: dict[str, Any]) -> Message:
        key = about.get("key")
        headers = {OWNER_HEADER: about["owner"].encode()} if about.get("owner") else {}
        return Message(
            (number, -1),
            self.now_us,
            value,
            key + b"%d" % number if key is not None else None,
            {**headers, "colour": key} if key is not None else headers,
            self.time(about.get("due")),
            about.get("priority"),
            self.time(about.get("expires")),
        )

    def time(self, seconds: float | None) -> int | None:
        return None if seconds is None else self.now_us + round(seconds * SECOND_US)

    def picked(self, picks: list[int], foreign: int) -> tuple[str, list[tuple[Id, int]]]:
        """Messages of one subscription with tokens that were given for them lately, each but once."""
        chosen = [self.tokens[-1 - pick % len(self.tokens)] for pick in picks]
        name = chosen[0][0]
        held = {at: token + foreign for other, at, token in chosen if other == name or foreign}
        return name, list(held.items())

    def change(self, change: tuple[str, Any], owner: str) -> tuple[MessageChange, str, Any]:
        what, how = change
        made = {
            "move": lambda: MessageChange(due_us=self.time(how)),
            "shift": lambda: MessageChange(shift_us=round(how * SECOND_US)),
            "priority": lambda: MessageChange(priority=how),
            "replace": lambda: MessageChange(replace=True),
            "delete": lambda: MessageChange(delete=True),
        }[what]()
        headers = {OWNER_HEADER: owner.encode(), "colour": b"new"} if owner else {"colour": b"new"}
        return made, owner, (self.values(1, 10)[0], headers)

    def selection(self, given: dict[str, Any]) -> Selection:
        key = given.get("key")
        return Selection(
            given.get("status", ""),
            self.time(given.get("low")),
            self.time(given.get("high")),
            key + b"0" if key is not None else None,
            given.get("owner", ""),
        )
