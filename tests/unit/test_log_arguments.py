"""Arguments of the embedded log that cannot be used are told as errors of Headrace."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import Log, errors
from headrace.model.arguments import shown

Use = Callable[[Log, Any], Any]

WITH_TIMEOUTS: dict[str, Use] = {
    "tail": lambda log, wait: next(log.tail(0, timeout=wait)),
    "cursor": lambda log, wait: next(log.cursor("c").tail(wait)),
    "consume": lambda log, wait: log.consume(1, timeout=wait),
    "wait": lambda log, wait: log.wait(0, timeout=wait),
}


@pytest.fixture(params=["files", "memory"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    with Log(tmp_path / "log" if request.param == "files" else ":memory:") as log:
        log.append(b"x")
        yield log


@pytest.mark.parametrize("bad", [float("nan"), -1, -float("inf"), "1", [], {}, True], ids=shown)
@pytest.mark.parametrize("name", ["tail", "consume", "wait"])
def test_timeouts_that_cannot_be(log: Log, name: str, bad: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="timeout is a number of seconds"):
        WITH_TIMEOUTS[name](log, bad)


@pytest.mark.parametrize("wait", [float("inf"), 1e308, 2**63, 10**400], ids=shown)
@pytest.mark.parametrize("name", WITH_TIMEOUTS)
def test_very_long_timeouts_are_for_ever(log: Log, name: str, wait: Any) -> None:
    assert WITH_TIMEOUTS[name](log, wait)


def test_a_wrong_timeout_is_told_before_anything_is_read(log: Log) -> None:
    with pytest.raises(errors.InvalidArgument):
        log.tail(timeout="1")  # type: ignore[arg-type]
