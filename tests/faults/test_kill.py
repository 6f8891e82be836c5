"""A writer is killed a hundred times at random moments; whatever it acknowledged is there, in order and unchanged."""

import os
from pathlib import Path
from random import Random, SystemRandom

import pytest
from tests.faults.writer import Report, Writers, kept
from tests.known import content, said

import headrace
from headrace.model.errors import LogNotFound

ROUNDS = 100
EVERYTHING_EVERY = 20
"""Reading all of a log again after every kill would take most of the time."""


class Model:
    """What must be in the log, and what may be."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.acknowledged = 0
        self.first_min = self.first_max = 0
        """What was certainly truncated, and what may have been, lies before these."""
        self.compacted_max = 0
        """What may have been compacted lies before this."""
        self.gone: set[int] = set()
        """What compaction has removed for good."""
        self.checked = 0
        """What was seen in the log lies before this."""

    def hear(self, reports: list[tuple[Report, int]]) -> None:
        for kind, number in reports:
            if kind is Report.LOST:
                pytest.fail(f"the writer found messages damaged from offset {number} on")
            elif kind is Report.OPENED:
                assert number >= max(self.acknowledged, self.checked), f"opened at {number} after {self.checked}"
            elif kind is Report.ACKNOWLEDGED:
                assert number >= self.acknowledged
                self.acknowledged = number
            elif kind is Report.TRUNCATING:
                self.first_max = max(self.first_max, number)
            elif kind is Report.TRUNCATED:
                self.first_min = max(self.first_min, number)
            elif kind is Report.COMPACTING:
                self.compacted_max = max(self.compacted_max, number)

    def check(self, log: headrace.Log, start: int) -> None:
        """Everything from an offset on is in order: nothing missing, nothing foreign, nothing back from the dead."""
        assert log.next_offset >= max(self.acknowledged, self.checked), "messages are missing at the end"
        assert self.first_min <= log.first_offset <= self.first_max
        expected = start = max(start, log.first_offset)
        for message in log.messages(start):
            self._check_gone(expected, message.offset)
            assert said(message) == content(self._seed, message.offset), f"at offset {message.offset}"
            assert message.offset not in self.gone, f"{message.offset} is back after it was compacted away"
            expected = message.offset + 1
        self._check_gone(expected, log.next_offset)
        self.checked = log.next_offset

    def _check_gone(self, start: int, stop: int) -> None:
        for offset in range(start, stop):
            assert offset < self.compacted_max, f"{offset} is missing"
            assert not kept(offset), f"{offset} is missing though the rule keeps it"
            self.gone.add(offset)


@pytest.mark.parametrize("churning", [False, True], ids=["appending", "truncating and compacting too"])
def test_what_was_acknowledged_survives_a_hundred_kills(tmp_path: Path, churning: bool) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", SystemRandom().getrandbits(32)))
    print(f"HEADRACE_SEED={seed}")  # pytest shows it when the test fails
    path, dice, model, segments = tmp_path / "log", Random(seed), Model(seed), 0
    writers = Writers(path, seed, churning=churning)
    try:
        for number in range(1, ROUNDS + 1):
            reports = writers.write_and_be_killed(number, dice.uniform(0, 0.02 if number % 4 == 0 else 0.1))
            model.hear(reports)
            try:
                with headrace.Log(path, readonly=True) as log:
                    model.check(log, 0 if number % EVERYTHING_EVERY == 0 else model.checked)
                    segments = max(segments, log.info()["segments"])
            except LogNotFound:
                assert not any(kind is Report.OPENED for kind, _ in reports), "the log is gone"
                assert not model.checked, "the log is gone"
    finally:
        writers.dismiss()
    assert model.acknowledged > 1000, "the writers hardly got to write: this tested nothing"
    assert segments > 3
    with headrace.Log(path) as log:
        assert not log.recovery.lost
        model.check(log, 0)
        assert log.verify().sound
