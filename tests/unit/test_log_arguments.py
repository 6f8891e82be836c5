"""Arguments of the embedded log that cannot be used are told as errors of Headrace."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
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


@pytest.mark.parametrize("bad", [None, 5, True, b"log", [], "a\0b", ""], ids=repr)
def test_paths_that_cannot_be(bad: Any) -> None:
    for use in (Log, headrace.repair):
        with pytest.raises(errors.InvalidArgument, match="path"):
            use(bad)


WRONG: dict[str, Use] = {
    "append": lambda log, bad: log.append(bad),
    "append key": lambda log, bad: log.append(b"", bad),
    "append headers": lambda log, bad: log.append(b"", headers=bad),
    "append timestamp": lambda log, bad: log.append(b"", timestamp=bad),
    "append_many": lambda log, bad: log.append_many(bad),
    "read": lambda log, bad: log.read(bad),
    "index": lambda log, bad: log[bad],
    "messages": lambda log, bad: log.messages(bad),
    "until": lambda log, bad: log.messages(until=bad),
    "time": lambda log, bad: log.messages(time=bad),
    "batches": lambda log, bad: log.batches(bad),
    "tail": lambda log, bad: next(log.tail(bad, timeout=0)),
    "find_time": lambda log, bad: log.find_time(bad),
    "wait": lambda log, bad: log.wait(bad),
    "consume": lambda log, bad: log.consume(bad),
    "cursor": lambda log, bad: log.cursor(bad),
    "commit": lambda log, bad: log.cursor("a").commit(bad),
    "seek": lambda log, bad: log.cursor("b").seek(bad),
    "seek time": lambda log, bad: log.cursor("c").seek(time=bad),
    "truncate_before": lambda log, bad: log.truncate_before(bad),
    "compact": lambda log, bad: log.compact(bad),
    "verify": lambda log, bad: log.verify(bad),
    **{
        name: lambda _, bad, name=name: Log(":memory:", **{name: bad})
        for name in [
            "sync_every",
            "compression",
            "segment_bytes",
            "segment_seconds",
            "retain_seconds",
            "retain_bytes",
            "memory_bytes",
            "host",
        ]
    },
}


@pytest.mark.parametrize("bad", [object(), 1.5j, [1], {"a": 1}], ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_another_kind(log: Log, name: str, bad: Any) -> None:
    with pytest.raises(errors.InvalidArgument):
        WRONG[name](log, bad)
    assert log.read(0).value == b"x"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "x" * 201, "ü", "a b"])
def test_names_that_a_cursor_cannot_have(log: Log, name: str) -> None:
    with pytest.raises(errors.InvalidArgument):
        log.cursor(name)


@pytest.mark.parametrize("bad", ["x" * (1 << 20), b"x" * (1 << 20)], ids=["str", "bytes"])
@pytest.mark.parametrize("name", [name for name in WRONG if name not in ("append", "append key")])
def test_errors_do_not_repeat_a_large_argument(log: Log, name: str, bad: Any) -> None:
    with pytest.raises(errors.InvalidArgument) as told:
        WRONG[name](log, bad)
    assert len(str(told.value)) < 1500


@pytest.mark.parametrize("name", ["read", "consume", "commit", "seek", "append timestamp"])
def test_numbers_too_long_to_be_written(log: Log, name: str) -> None:
    with pytest.raises(errors.HeadraceError):
        WRONG[name](log, -(10**5000))
