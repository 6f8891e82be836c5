"""The history of a cluster as its clients saw it, and the promises that it must keep.

Clients append records to files as lines of JSON: what they are about to ask for before they send it, and what they were
told after it came. Times are microseconds of the machine's monotonic clock, those of leases of the broker's clock. The
checkers here are pure functions that return what is wrong; test_cluster_history.py shows each a broken history.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
from tests.faults.lease_history import DONE, LeaseHistory

Place = tuple[str, int]
"""Topic and partition."""
FinalLog = dict[Place, dict[int, str]]
"""What readers see in the end: places to offsets to values."""


class Record(msgspec.Struct, omit_defaults=True):
    """Something a client was about to ask for, or was told."""

    what: str
    who: str = ""
    time_us: int = 0
    """When it was written: before the request was sent, or after the answer came."""
    node: str = ""
    """The node that answered, if that is known."""
    topic: str = ""
    partition: int = 0
    offset: int = -1
    value: str = ""
    error: str = ""
    number: int = 0
    """Of the request of this client, or of the transaction."""
    verb: str = ""
    token: int = 0
    begin_us: int = 0
    until_us: int = 0
    values: list[tuple[str, str]] = []
    """Of a transaction: topics and values."""

    @property
    def place(self) -> Place:
        """Topic and partition."""
        return self.topic, self.partition


SEND, SENT, UNSENT = "send", "sent", "unsent"
READ = "read"
LEASED, ASK, TOLD = "leased", "ask", "told"
COMMIT, COMMITTED, REFUSED, POSITION, JOIN = "commit", "committed", "refused", "position", "join"
BEGIN, DONE_WHOLE, GIVEN_UP = "begin", "done", "given up"


def now_us() -> int:
    """Now, by the clock that all processes of the machine share."""
    return time.monotonic_ns() // 1000


class HistoryFile:
    """Records in a file; killing the process does not take back what was written."""

    def __init__(self, path: str | Path, who: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._who = who
        self._encoder = msgspec.json.Encoder()

    def write(self, *records: Record) -> None:
        """Write records down, with the time."""
        time_us = now_us()
        for record in records:
            record.who, record.time_us = self._who, time_us
        os.write(self._file, b"".join(self._encoder.encode(record) + b"\n" for record in records))


class HistoryReader:
    """All history files of a directory, read as they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}
        self._decoder = msgspec.json.Decoder(Record)
        self.records: list[Record] = []

    def update(self) -> list[Record]:
        """Read what is new; returns that."""
        new: list[Record] = []
        for path in sorted(self._directory.glob("*.history")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            new += map(self._decoder.decode, whole.splitlines())
        self.records += new
        return new


def lost(records: Iterable[Record], final: FinalLog) -> Iterator[str]:
    """Find acknowledged messages that are not in the log where the acknowledgement said."""
    for one in records:
        if one.what == SENT and final.get(one.place, {}).get(one.offset) != one.value:
            found = final.get(one.place, {}).get(one.offset, "nothing")
            yield f"{one.who} was told {one.place} {one.offset} for {one.value}, where there is {found}"


def fenced_acknowledgements(records: Iterable[Record], final: FinalLog) -> Iterator[str]:
    """Find acknowledgements of a known node for messages that are nowhere in the log: the node was fenced."""
    present = {(place, value) for place, values in final.items() for value in values.values()}
    for one in records:
        if one.what == SENT and one.node and (one.place, one.value) not in present:
            yield f"node {one.node} acknowledged {one.value} at {one.time_us}, but it is not in {one.place}"


def doubled(final: FinalLog) -> Iterator[str]:
    """Find values that are in the log twice: every message of a producer has its own value."""
    seen: dict[tuple[str, str], tuple[Place, int]] = {}
    for place, values in final.items():
        for offset, value in values.items():
            before = seen.setdefault((place[0], value), (place, offset))
            if before != (place, offset):
                yield f"{value} is at {before} and at {(place, offset)}"


def unknown(records: Iterable[Record], final: FinalLog) -> Iterator[str]:
    """Find values in the log that nobody sent."""
    sent = {(one.topic, one.value) for one in records if one.what == SEND}
    sent |= {pair for one in records if one.what == BEGIN for pair in one.values}
    for place, values in final.items():
        for offset, value in values.items():
            if (place[0], value) not in sent:
                yield f"{place} {offset} has {value}, which nobody sent"


def two_values(records: Iterable[Record], final: FinalLog) -> Iterator[str]:
    """Find offsets that had another value for another reader, or for the same one at another time."""
    seen: dict[tuple[Place, int], tuple[str, str]] = {
        (place, offset): (value, "the log in the end")
        for place, values in final.items()
        for offset, value in values.items()
    }
    for one in records:
        if one.what in (SENT, READ, LEASED) and one.offset >= 0 and one.value:
            value, who = seen.setdefault((one.place, one.offset), (one.value, one.who))
            if value != one.value:
                yield f"{one.place} {one.offset} is {one.value} for {one.who}, and {value} for {who}"


def vanished(records: Iterable[Record], final: FinalLog) -> Iterator[str]:
    """Find messages that a reader was given and that are not in the log in the end."""
    for one in records:
        if one.what in (READ, LEASED) and one.offset not in final.get(one.place, {}):
            yield f"{one.who} has read {one.place} {one.offset} ({one.value}), which is not there"


def unordered(records: Iterable[Record], final: FinalLog) -> Iterator[str]:
    """Find messages of one producer whose order in a partition is not the order in which it sent them."""
    numbers = {(one.topic, one.value): (one.who, one.number) for one in records if one.what == SEND and one.number}
    for place, values in final.items():
        last: dict[str, int] = {}
        for offset in sorted(values):
            who, number = numbers.get((place[0], values[offset]), ("", 0))
            if who and number < last.get(who, 0):
                yield f"{place} {offset} has {who}'s message {number} behind its message {last[who]}"
            last[who] = max(number, last.get(who, 0))


def leases(records: Iterable[Record]) -> Iterator[str]:
    """Find messages with two valid leases at a time, settled twice, or handed out after they were acknowledged."""
    history = LeaseHistory()
    answers = []
    for one in records:
        place = (one.partition, one.offset)
        if one.what == LEASED:
            history.leased(place, one.token, one.who, one.begin_us, one.until_us)
        elif one.what == ASK:
            history.asked(one.number, one.verb, one.who, one.token, [place], one.begin_us)
        elif one.what == TOLD:
            answers.append(one)
    for one in answers:  # files are read one after the other: an answer may come before its question
        history.answered(one.number, one.who, (one.partition, one.offset), one.error or DONE, one.begin_us)
    for place, story in history.stories.items():
        for mistake in story.mistakes():
            yield f"{place}: {mistake}\n{story}"


def positions(records: Iterable[Record]) -> Iterator[str]:
    """Find positions that a group was given when it joined behind what was committed before it asked."""
    commits: dict[tuple[str, Place], list[tuple[int, int]]] = defaultdict(list)
    joins: dict[tuple[str, int], int] = {}
    told = []
    for one in records:
        if one.what == COMMITTED:
            commits[one.value, one.place].append((one.time_us, one.offset))
        elif one.what == JOIN:
            joins[one.who, one.number] = one.time_us
        elif one.what == POSITION:
            told.append(one)
    for one in told:
        asked_us = joins[one.who, one.number]
        before = max((offset for time_us, offset in commits[one.value, one.place] if time_us < asked_us), default=0)
        if one.offset < before:
            yield f"{one.who} of {one.value} begins at {one.place} {one.offset}; {before} was committed before"


def refused(records: Iterable[Record]) -> Iterator[str]:
    """Find commits of positions that the broker refused, although it had delivered everything before them."""
    for one in records:
        if one.what == REFUSED:
            yield f"{one.who} of {one.value} could not commit {one.place} {one.offset}: {one.error}"


def unread(records: Iterable[Record], final: FinalLog) -> Iterator[str]:
    """Find positions that a group committed beyond a message that none of its members was given."""
    given: dict[tuple[str, Place], set[int]] = defaultdict(set)
    ends: dict[tuple[str, Place], int] = {}
    for one in records:
        if one.what == READ and one.verb:
            given[one.verb, one.place].add(one.offset)
        elif one.what == COMMITTED:
            key = one.value, one.place
            ends[key] = max(one.offset, ends.get(key, 0))
    for (group, place), end in ends.items():
        missing = {offset for offset in final.get(place, {}) if offset < end} - given[group, place]
        if missing:
            yield f"{group} committed {place} {end}, but nobody was given {sorted(missing)[:5]}"


class _Whole(NamedTuple):
    values: frozenset[tuple[str, str]]
    attempt: int


def broken_transactions(records: Iterable[Record], final: FinalLog) -> Iterator[str]:
    """Find transactions of which the log has a part, or an attempt that was given up, or two attempts, or nothing
    although the commit was acknowledged."""
    attempts: dict[tuple[str, int], list[_Whole]] = defaultdict(list)
    done: dict[tuple[str, int], int] = {}
    given_up: set[tuple[str, int, int]] = set()
    for one in records:
        key = one.value, one.number
        if one.what == BEGIN:
            attempts[key].append(_Whole(frozenset(one.values), one.token))
        elif one.what == DONE_WHOLE:
            done[key] = one.token
        elif one.what == GIVEN_UP:
            given_up.add((*key, one.token))
    present = {(topic, value) for (topic, _), values in final.items() for value in values.values()}
    for key, tried in attempts.items():
        whole = [one.attempt for one in tried if one.values <= present]
        for one in tried:
            if one.values & present and not one.values <= present:
                yield f"of {key}, attempt {one.attempt}, there is only {sorted(one.values & present)}"
            if one.values <= present and (*key, one.attempt) in given_up:
                yield f"{key}, attempt {one.attempt}, was aborted, and is there"
        if len(whole) > 1:
            yield f"{key} is there {len(whole)} times: attempts {whole}"
        if key in done and not whole:
            yield f"{key} was committed, and is not there"
        if done.get(key) and whole and whole != [done[key]]:
            yield f"{key} was committed with attempt {done[key]}, but {whole} is there"


def mistakes(records: list[Record], final: FinalLog) -> list[str]:
    """All that is wrong with a history and the log at its end."""
    return [
        f"{name}: {mistake}"
        for name, found in (
            ("lost", lost(records, final)),
            ("acknowledged by a fenced node", fenced_acknowledgements(records, final)),
            ("doubled", doubled(final)),
            ("sent by nobody", unknown(records, final)),
            ("two values", two_values(records, final)),
            ("vanished", vanished(records, final)),
            ("order", unordered(records, final)),
            ("leases", leases(records)),
            ("positions", positions(records)),
            ("refused", refused(records)),
            ("unread", unread(records, final)),
            ("transactions", broken_transactions(records, final)),
        )
        for mistake in found
    ]


def dump(records: Iterable[Record], path: Path) -> None:
    """Keep a history for later, with its records in the order of time."""
    with path.open("wb") as file:
        for record in sorted(records, key=lambda one: one.time_us):
            file.write(msgspec.json.encode(record) + b"\n")


def pauses_us(records: Iterable[Record]) -> list[tuple[int, int]]:
    """The gaps between acknowledgements of any producer: their beginnings and lengths, longest first."""
    times = sorted(one.time_us for one in records if one.what == SENT)
    return sorted(((one, two - one) for one, two in pairwise(times)), key=lambda gap: -gap[1])
