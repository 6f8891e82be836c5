"""Negative controls: checkers of cluster histories accept a right history, and find each mistake in a broken one."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.cluster_history import (
    ASK,
    BEGIN,
    COMMITTED,
    DONE_WHOLE,
    GIVEN_UP,
    JOIN,
    LEASED,
    POSITION,
    READ,
    REFUSED,
    SEND,
    SENT,
    TOLD,
    FinalLog,
    HistoryFile,
    HistoryReader,
    Record,
    mistakes,
    pauses_us,
)

T: Any = {"topic": "t"}
JOBS: Any = {"topic": "jobs"}
FINAL: FinalLog = {
    ("t", 0): {0: "a", 1: "b", 2: "z"},
    ("jobs", 0): {0: "job"},
    ("one", 0): {0: "tx.1.1.one"},
    ("two", 0): {0: "tx.1.1.two"},
}
PAIR = [("one", "tx.1.1.one"), ("two", "tx.1.1.two")]
OTHER_PAIR = [("one", "tx.1.2.one"), ("two", "tx.1.2.two")]


def right() -> list[Record]:
    """A history without a mistake, of every kind of record."""
    return [
        Record(SEND, "p", 1, value="a", number=1, **T),
        Record(SENT, "p", 2, value="a", offset=0, **T),
        Record(SEND, "p", 3, value="b", number=2, **T),
        Record(SENT, "p", 4, value="b", offset=1, **T),
        Record(SEND, "p", 5, value="never", number=3, **T),  # without an answer it may be there or not
        Record(SEND, "sticky", 6, value="z", number=1, **T),
        Record(SENT, "sticky", 7, value="z", offset=2, node="n1", **T),
        Record(SEND, "q", 1, value="job", number=1, **JOBS),
        Record(SENT, "q", 2, value="job", offset=0, **JOBS),
        Record(READ, "r", 8, value="a", offset=0, verb="g", **T),
        Record(READ, "r", 8, value="b", offset=1, verb="g", **T),
        Record(COMMITTED, "r", 9, value="g", offset=2, **T),
        Record(JOIN, "r", 10, number=1),
        Record(POSITION, "r", 11, value="g", offset=2, number=1, **T),
        Record(LEASED, "w1", 20, value="job", offset=0, token=5, begin_us=100, until_us=200, **JOBS),
        Record(LEASED, "w2", 22, value="job", offset=0, token=6, begin_us=200, until_us=300, **JOBS),
        Record(ASK, "w2", 23, offset=0, token=6, number=1, verb="ack", begin_us=250, **JOBS),
        Record(TOLD, "w2", 24, offset=0, token=6, number=1, begin_us=260, **JOBS),
        Record(BEGIN, "x", 30, value="tx", number=1, token=1, values=PAIR),
        Record(BEGIN, "x", 31, value="tx", number=1, token=2, values=OTHER_PAIR),
        Record(DONE_WHOLE, "x", 32, value="tx", number=1, token=1),
    ]


def changed(final: FinalLog, topic: str, values: dict[int, str]) -> FinalLog:
    """The log with another content of a topic."""
    return {**final, (topic, 0): values}


def test_a_right_history_has_no_mistakes() -> None:
    assert mistakes(right(), FINAL) == []


def leased_again(begin_us: int) -> list[Record]:
    """Another lease of the job."""
    return [
        Record(LEASED, "w3", 50, value="job", token=7, begin_us=begin_us, until_us=begin_us + 100, offset=0, **JOBS)
    ]


def joined_at(offset: int) -> list[Record]:
    """Another member of the group, and where it was told to begin."""
    return [Record(JOIN, "s", 12, number=1), Record(POSITION, "s", 13, value="g", offset=offset, number=1, **T)]


def pairs(*attempts: int) -> FinalLog:
    """The log with these attempts of the transaction."""
    ones = {offset: f"tx.1.{attempt}.one" for offset, attempt in enumerate(attempts)}
    twos = {offset: f"tx.1.{attempt}.two" for offset, attempt in enumerate(attempts)}
    return changed(changed(FINAL, "one", ones), "two", twos)


@pytest.mark.parametrize(
    ("found", "more", "final"),
    [
        ("lost", [], changed(FINAL, "t", {0: "a", 2: "z"})),
        ("acknowledged by a fenced node", [], changed(FINAL, "t", {0: "a", 1: "b"})),
        ("doubled", [], changed(FINAL, "t", {0: "a", 1: "b", 2: "z", 3: "b"})),
        ("sent by nobody", [], changed(FINAL, "t", {0: "a", 1: "b", 2: "z", 3: "?"})),
        ("two values", [Record(READ, "r", 40, value="x", offset=0, **T)], FINAL),
        ("vanished", [Record(READ, "r", 40, value="q", offset=3, **T)], FINAL),
        ("order", [], changed(FINAL, "t", {0: "b", 1: "a", 2: "z"})),
        ("leases", leased_again(240), FINAL),
        ("leases", leased_again(300), FINAL),
        ("positions", joined_at(1), FINAL),
        ("unread", [Record(COMMITTED, "r", 15, value="g", offset=3, **T)], FINAL),
        ("refused", [Record(REFUSED, "r", 15, value="g", offset=3, error="invalid_argument: outside", **T)], FINAL),
        ("transactions", [], changed(FINAL, "two", {})),
        ("transactions", [], pairs()),
        ("transactions", [], pairs(1, 2)),
        ("transactions", [], pairs(2)),
        ("transactions", [Record(GIVEN_UP, "x", 33, value="tx", number=1, token=1)], FINAL),
    ],
    ids=[
        "an acknowledged message is gone",
        "a fenced node acknowledged",
        "a message is there twice",
        "a message of nobody",
        "an offset had another value",
        "a message that was read is gone",
        "a producer's order",
        "two leases at a time",
        "handed out after it was acknowledged",
        "a position behind a commit",
        "a commit beyond what was read",
        "a commit that was refused",
        "half a transaction",
        "a committed transaction is gone",
        "two attempts of a transaction",
        "another attempt than the one that was committed",
        "an aborted transaction is there",
    ],
)
def test_a_broken_history_is_found(found: str, more: list[Record], final: FinalLog) -> None:
    assert found in _names(mistakes([*right(), *more], final))


def test_each_mistake_is_found_by_the_checker_that_is_for_it_alone() -> None:
    """What only one checker can see is not hidden by the others."""
    assert _names(mistakes([*right(), *joined_at(1)], FINAL)) == {"positions"}
    half = changed(FINAL, "two", {})
    assert _names(mistakes(right(), half)) == {"transactions"}


def _names(found: Iterable[str]) -> set[str]:
    return {one.partition(":")[0] for one in found}


def test_history_survives_its_writer_in_the_middle_of_a_line(tmp_path: Path) -> None:
    reader = HistoryReader(tmp_path)
    HistoryFile(tmp_path / "p.history", "p").write(Record(SEND, value="a"), Record(SENT, value="a", offset=0))
    with (tmp_path / "p.history").open("ab") as file:
        file.write(b'{"what":"se')
    assert [(one.what, one.who, one.value) for one in reader.update()] == [("send", "p", "a"), ("sent", "p", "a")]
    with (tmp_path / "p.history").open("ab") as file:
        file.write(b'nd"}\n')
    assert [one.what for one in reader.update()] == ["send"]
    assert len(reader.records) == 3


def test_pauses_are_the_gaps_between_acknowledgements() -> None:
    records = [Record(SENT, time_us=time_us) for time_us in (50, 10, 20)]
    assert pauses_us(records) == [(20, 30), (10, 10)]
