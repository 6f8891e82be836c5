"""Stories of consumer groups, told in groups/*.txt: what happens, a line of dashes, and what comes of it.

Lines with # are for the reader. HEADRACE_REWRITE_STORIES=1 writes down what comes of it now; read what `git diff` says.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.broker.groups import AssignedPartition, AssignmentChange, Changes, Group
from headrace.model.errors import HeadraceError

STORIES = sorted((Path(__file__).parent / "groups").glob("*.txt"))
SECOND_US = 1_000_000


@dataclass
class Scene:
    """What the story says up to some dashes, the events among it, and what is expected of them."""

    told: list[str]
    expected: list[str]

    @property
    def events(self) -> list[str]:
        return [line for line in self.told if line and not line.startswith("#")]


def parse(text: str) -> Iterator[Scene]:
    """The scenes of a story; what is expected ends with an empty line."""
    told: list[str] = []
    expected: list[str] | None = None
    for line in [*text.splitlines(), ""]:
        if expected is None and line == "----":
            expected = []
        elif expected is None:
            told.append(line)
        elif line:
            expected.append(line)
        else:
            yield Scene(told, expected)
            told, expected = [], None
    assert not any(told), f"no ---- after {told}"


def written(scenes: list[Scene]) -> str:
    """The story as text."""
    return "\n".join("\n".join([*scene.told, "----", *scene.expected, ""]) for scene in scenes)


class Stage:
    """A group, its members, and what each of them believes to have: from what it was told while it could hear."""

    def __init__(self) -> None:
        self.group = Group("billing", 0)
        self.available: dict[str, int] = {}
        self.now_us = 0
        self.believed: dict[str, dict[tuple[str, int], int]] = {}
        self.revoked: dict[str, dict[tuple[str, int], int]] = {}
        self.deaf: set[str] = set()

    def play(self, event: str) -> Iterator[str]:
        """What comes of a line such as `join alice orders`."""
        word, *arguments = event.split()
        act: Callable[..., Iterator[str]] | None = getattr(self, f"do_{word}", None)
        assert act is not None, f"a story has no {word!r}"
        try:
            yield from act(*arguments)
        except HeadraceError as error:
            yield f"refused, {error.code}: {error}"

    def do_topics(self, *sizes: str) -> Iterator[str]:
        """`topics orders=4 audit=1`: these are there now."""
        self.available = {name: int(count) for name, count in (size.split("=") for size in sizes)}
        yield from self.tell(self.group.topics_changed(self.available, self.now_us))

    def do_join(self, member: str, *wishes: str) -> Iterator[str]:
        """`join alice orders aud* session=5s`: words with * or ? are patterns; comes again if it is there."""
        session = next((wish for wish in wishes if wish.startswith("session=")), "session=10s")
        names = [wish for wish in wishes if wish != session]
        patterns = [name for name in names if "*" in name or "?" in name]
        topics = [name for name in names if name not in patterns]
        session_us = microseconds(session.removeprefix("session="))
        self.deaf.discard(member)
        changes = self.group.join(member, "", topics, patterns, session_us, self.available, self.now_us)
        # The answer to a join tells all that the member may read: what it believed before does not matter.
        held = [one for one in self.group.held(member) if one not in changes.get(member, AssignmentChange()).assigned]
        self.believed[member] = {one[:2]: one.epoch for one in held}
        if held:
            yield f"{member} keeps {listed(held)}"
        yield from self.tell(changes)

    def do_leave(self, member: str) -> Iterator[str]:
        """`leave alice`."""
        yield from self.tell(self.group.leave(member, self.now_us))
        del self.believed[member]

    def do_cut(self, member: str) -> Iterator[str]:
        """`cut alice`: it hears nothing more until it joins again."""
        self.deaf.add(member)
        yield f"{member} hears nothing more"

    def do_touch(self, *members: str) -> Iterator[str]:
        """`touch alice bob`: they show that they are alive."""
        for member in members:
            self.group.touch(member, self.now_us)
        yield "nothing changes"

    def do_wait(self, time: str, *alive: str) -> Iterator[str]:
        """`wait 10s alice`: time passes; those who are named stay in touch."""
        end_us = self.now_us + microseconds(time)
        quiet = True
        while self.now_us < end_us:
            due_us = self.group.next_tick_us()
            self.now_us = end_us if due_us is None else min(end_us, max(due_us, self.now_us))
            for member in alive:
                self.group.touch(member, self.now_us)
            if changes := self.group.tick(self.now_us):
                quiet = False
                yield f"at {self.now_us / SECOND_US:g}s"
                yield from self.tell(changes)
        if quiet:
            yield "nothing changes"

    def do_release(self, member: str, *places: str) -> Iterator[str]:
        """`release alice orders/1`, or all that was revoked; `orders/1@7`: of that assignment."""
        revoked = self.revoked.get(member, {})
        released = [assigned_of(place, revoked) for place in places] or [
            AssignedPartition(*place, epoch) for place, epoch in revoked.items()
        ]
        for one in released:
            revoked.pop(one[:2], None)
            self.believed[member].pop(one[:2], None)
        yield from self.tell(self.group.release(member, released, self.now_us))

    def do_commit(self, member: str, place: str) -> Iterator[str]:
        """`commit alice orders/1`: under the assignment that it believes to have; `orders/1@7`: under that."""
        self.group.check(member, *assigned_of(place, self.believed.get(member, {})))
        yield "accepted"

    def do_seek(self, topic: str, *numbers: str) -> Iterator[str]:
        """`seek orders 0 1`, or all of its partitions."""
        partitions = [int(number) for number in numbers] or range(self.available[topic])
        yield from self.tell(self.group.restart(topic, partitions, self.now_us))

    def do_show(self) -> Iterator[str]:
        """`show`: everything."""
        yield f"generation {self.group.generation}"
        for member, known in self.group.members.items():
            held = self.group.held(member)
            revoked = sorted(set(known.owned.values()) - set(held))
            yield f"{member} reads {listed(held)}" + (f", is to release {listed(revoked)}" if revoked else "")
        for topic, count in sorted(self.available.items()):
            if free := [f"{topic}/{number}" for number in range(count) if self.group.owner(topic, number) is None]:
                yield f"nobody reads {' '.join(free)}"

    def tell(self, changes: Changes) -> Iterator[str]:
        """Tell the members, and the reader."""
        for member, change in changes.items():
            if member not in self.deaf:
                self.hear(member, change)
            if change.expired:
                yield f"{member} is given up"
            for what in ("lost", "revoked", "assigned"):
                if places := getattr(change, what):
                    yield f"{member} {what} {listed(places)}"
        if not changes:
            yield "nothing changes"

    def hear(self, member: str, change: AssignmentChange) -> None:
        believed, revoked = self.believed[member], self.revoked.setdefault(member, {})
        for one in change.lost:
            believed.pop(one[:2], None)
            revoked.pop(one[:2], None)
        for kind, heard in ((change.revoked, revoked), (change.revoked, believed), (change.assigned, believed)):
            heard.update({one[:2]: one.epoch for one in kind})


def microseconds(text: str) -> int:
    found = re.fullmatch(r"([0-9.]+)s", text)
    assert found, f"{text!r} is no time such as 2.5s"
    return round(float(found[1]) * SECOND_US)


def assigned_of(text: str, known: dict[tuple[str, int], int]) -> AssignedPartition:
    """The assignment that `orders/1@7` names; without an epoch, the one that is known."""
    place, _, epoch = text.partition("@")
    topic, _, number = place.rpartition("/")
    return AssignedPartition(topic, int(number), int(epoch) if epoch else known[topic, int(number)])


def listed(assigned: list[AssignedPartition]) -> str:
    return " ".join(f"{one.topic}/{one.partition}@{one.epoch}" for one in assigned) or "nothing"


def played(scenes: list[Scene]) -> list[Scene]:
    """The scenes with what comes of them."""
    stage = Stage()
    return [Scene(scene.told, [line for event in scene.events for line in stage.play(event)]) for scene in scenes]


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    scenes = list(parse(path.read_text(encoding="utf-8")))
    outcome = played(scenes)
    if os.environ.get("HEADRACE_REWRITE_STORIES"):
        path.write_text(written(outcome), encoding="utf-8")
        return
    for scene, came in zip(scenes, outcome, strict=True):
        assert came.expected == scene.expected, f"in {path.name}, after {scene.events[-1]!r}"
    assert written(scenes) == path.read_text(encoding="utf-8")


def test_there_are_stories() -> None:
    assert len(STORIES) >= 8


def test_a_wrong_story_is_noticed() -> None:
    story = "topics orders=1\n----\nnothing changes\n\njoin alice orders\n----\nalice assigned orders/1@1\n"
    scenes = list(parse(story))
    assert written(scenes) == story
    first, second = played(scenes)
    assert first == scenes[0]
    assert second.expected == ["alice assigned orders/0@1"]
