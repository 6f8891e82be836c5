"""A history of leases as their holders saw it, and the promises that it must keep: the same for a bench and processes.

Times are microseconds of one clock, the broker's. A holder writes down what it asks for before it sends it, and what it
was told after that came, so that whatever the broker did lies between.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

Place = tuple[int, int]
"""Partition and offset."""

ACK, EXTEND, RELEASE, REJECT, DELETE = "ack", "extend", "release", "reject", "delete"
_LAST = (ACK, REJECT, DELETE)
"""What settles a message for good."""
DONE = "done"


@dataclass
class Said:
    """Something asked about a message. Without an outcome nobody knows whether it was done."""

    verb: str
    holder: str
    token: int
    asked_us: int
    lease_us: int = 0
    """With an extension, for how long."""
    outcome: str = ""
    until_us: int = 0
    answered_us: int = 0

    @property
    def may_be_done(self) -> bool:
        """Whether it was done, or nobody knows."""
        return self.outcome in ("", DONE)


@dataclass
class Granted:
    """A lease of a message, as its holder was told."""

    token: int
    holder: str
    begin_us: int
    until_us: int


@dataclass
class Story:
    """All that was said about one message."""

    leases: list[Granted] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [(one.begin_us, f"{one.holder} has it under {one.token} until {one.until_us}") for one in self.leases]
        for one in self.said:
            until = f", until {one.until_us}" if one.until_us else ""
            lines.append(
                (
                    one.asked_us,
                    f"{one.holder} asks to {one.verb} it under {one.token}: {one.outcome or 'no answer'} "
                    f"at {one.answered_us}{until}",
                )
            )
        return "\n".join(f"  {time_us} {text}" for time_us, text in sorted(lines))

    def spans(self, lease: Granted) -> list[tuple[int, int]]:
        """When its holder could rely on a lease: from the grant or an extension to the end it was told.

        From the moment it asks for something that ends the lease, or may end it sooner, it cannot.
        """
        spans = [(lease.begin_us, lease.until_us)]
        for one in self.said:
            if one.token != lease.token or not one.may_be_done:
                continue
            end_us = one.asked_us + one.lease_us if one.verb == EXTEND else one.asked_us
            spans = [(begin_us, min(until_us, end_us)) for begin_us, until_us in spans]
            if one.verb == EXTEND and one.outcome == DONE:
                spans.append((one.until_us - one.lease_us, one.until_us))
        return spans

    def mistakes(self) -> Iterable[str]:
        """What must never be: the promises that were not kept."""
        held = {lease.token: self.spans(lease) for lease in self.leases}
        for token, spans in held.items():
            for other, others in held.items():
                if token < other and any(_overlap(one, two) for one in spans for two in others):
                    yield f"the leases {token} and {other} are valid at the same time"
        settled = [one for one in self.said if one.verb in _LAST and one.outcome == DONE]
        if len(settled) > 1 and any(one.verb != DELETE for one in settled):  # deleting again is answered as done
            yield "it was settled more than once"
        for one in settled:
            if one.verb == DELETE and any(_inside(one.asked_us, span) for spans in held.values() for span in spans):
                yield "it was deleted while somebody held it"
            # Tokens rise: a greater one was handed out later, before the end, which then had to be refused, or after.
            if one.verb != DELETE and max(held, default=0) > one.token:
                yield f"the {one.verb} of {one.token} was accepted, though another was handed it"
            late = [lease.token for lease in self.leases if lease.begin_us > one.answered_us]
            if late:
                yield f"it was handed out under {late} after it was settled"
        released = Counter(one.token for one in self.said if one.verb == RELEASE and one.outcome == DONE)
        if released and max(released.values()) > 1:
            yield "it was released twice under one lease"


def _overlap(one: tuple[int, int], two: tuple[int, int]) -> bool:
    return max(one[0], two[0]) < min(one[1], two[1])


def _inside(time_us: int, span: tuple[int, int]) -> bool:
    return span[0] < time_us < span[1]


class LeaseHistory:
    """What all holders of a queue's messages asked for and were told."""

    def __init__(self) -> None:
        self.stories: defaultdict[Place, Story] = defaultdict(Story)
        self._asked: dict[tuple[str, int, Place], Said] = {}

    def leased(self, place: Place, token: int, holder: str, begin_us: int, until_us: int) -> None:
        """Somebody was told that it has a message."""
        self.stories[place].leases.append(Granted(token, holder, begin_us, until_us))

    def asked(
        self, number: int, verb: str, holder: str, token: int, places: Iterable[Place], time_us: int, lease_us: int = 0
    ) -> None:
        """Somebody is about to ask for something, its request of that number."""
        for place in places:
            said = self._asked[holder, number, place] = Said(verb, holder, token, time_us, lease_us)
            self.stories[place].said.append(said)

    def answered(self, number: int, holder: str, place: Place, outcome: str, time_us: int, until_us: int = 0) -> None:
        """It was told what became of that: done, or why not. What failed for other reasons was never answered."""
        said = self._asked[holder, number, place]
        said.outcome, said.answered_us, said.until_us = outcome, time_us, until_us

    def check(self) -> None:
        """Every promise was kept."""
        for place, story in self.stories.items():
            for mistake in story.mistakes():
                raise AssertionError(f"{place}: {mistake}\n{story}")

    def check_end(self, published: Iterable[Place], dead: Counter[Place]) -> None:
        """Nothing is left, and every message that was published was settled once: acknowledged, or dead, or deleted."""
        self.check()
        for place in published:
            story = self.stories[place]
            done = [one.verb for one in story.said if one.verb in _LAST and one.outcome == DONE]
            doubtful = [one.verb for one in story.said if one.verb in _LAST and not one.outcome]
            buried = dead[place]
            right = buried == (done == [REJECT]) if done else buried == 1 or (buried == 0 and bool(doubtful))
            assert right, f"{place} was settled by {done}, perhaps by {doubtful}, and is dead {buried} times\n{story}"
