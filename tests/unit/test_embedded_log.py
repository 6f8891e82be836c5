"""The embedded log as its users see it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import Log
from headrace.model.errors import (
    CursorInUse,
    InvalidArgument,
    LogClosed,
    LogInUse,
    LogNotFound,
    LogReadOnly,
    MessageGone,
    MessageTooLarge,
    OffsetOutOfRange,
)
from headrace.model.limits import MESSAGE_BYTES_MAX, TIMESTAMP_US_MAX, TIMESTAMP_US_MIN
from headrace.storage import offline_reader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture(params=["files", "memory"])
def log(request: pytest.FixtureRequest, path: Path) -> Iterator[Log]:
    with Log(path if request.param == "files" else ":memory:") as log:
        yield log


def values(messages: object) -> list[bytes | None]:
    return [message.value for message in messages]  # type: ignore[attr-defined]


def test_appended_messages_have_offsets_and_can_be_read(log: Log) -> None:
    assert [log.append(value) for value in (b"a", b"b")] == [0, 1]
    assert log.append(b"c", key=b"k", headers={"text": "ü", "bytes": b"\xff"}, timestamp=5) == 2
    assert log.append_many(b"%d" % number for number in range(5000)) == range(3, 5003)
    assert len(log) == log.next_offset == 5003
    assert values(log)[:4] == [b"a", b"b", b"c", b"0"]
    message = log.read(2)
    assert (message.key, message.headers, message.timestamp) == (b"k", {"text": "ü".encode(), "bytes": b"\xff"}, 5)
    assert log[5002].value == b"4999"


def test_headers_may_repeat_a_name_and_hold_none(log: Log) -> None:
    pairs = [("a", b"1"), ("b", "ü"), ("a", None), ("", b"")]
    log.append(b"", headers=pairs)
    log.append(b"", headers={"a": None})
    log.append(b"", headers=log.read(0).headers)
    log.flush()
    stored = [("a", b"1"), ("b", "ü".encode()), ("a", None), ("", b"")]
    assert [message.header_list for message in log] == [stored, [("a", None)], stored]
    assert [message.headers for message in log] == [dict(stored), {"a": None}, dict(stored)]


def test_plain_and_full_messages_mix(log: Log) -> None:
    log.append(b"plain")
    log.append(b"keyed", key=b"k")
    log.append(b"plain again")
    log.append_many([b"many"])
    log.append(None, key=b"k")
    assert [(message.value, message.key) for message in log] == [
        (b"plain", None),
        (b"keyed", b"k"),
        (b"plain again", None),
        (b"many", None),
        (None, b"k"),
    ]


def test_indexing_and_slicing(log: Log) -> None:
    log.append_many([b"%d" % number for number in range(10)])
    assert log[-1].value == b"9"
    assert values(log[2:4]) == [b"2", b"3"]
    assert values(log[-2:]) == [b"8", b"9"]
    assert values(log[:]) == values(log)
    assert log[20:] == log[4:4] == []
    for offset in (10, -11):
        with pytest.raises(OffsetOutOfRange):
            log[offset]
    with pytest.raises(LookupError):
        log.read(99)
    with pytest.raises(InvalidArgument):
        log[::2]


def test_reading_by_time(log: Log) -> None:
    for time_us in (100, 200, 300):
        log.append(b"%d" % time_us, timestamp=time_us)
    assert values(log.messages(time=150)) == [b"200", b"300"]
    assert log.find_time(301) == 3
    with pytest.raises(InvalidArgument):
        log.messages(1, time=1)


def test_a_message_without_a_time_gets_the_present_one(log: Log) -> None:
    before = time.time_ns() // 1000
    log.append(b"x")
    assert before <= log[0].timestamp <= time.time_ns() // 1000


def test_batches_are_lists_of_values(log: Log) -> None:
    log.append_many([b"x"] * 5000)
    batches = list(log.batches(1000))
    assert batches[0].base_offset <= 1000
    assert sum(len(batch.columns().values) for batch in batches) >= 4000


@pytest.mark.parametrize("value", ["text", 5, ["list"], object()])
def test_what_is_not_bytes_is_refused(log: Log, value: object) -> None:
    with pytest.raises(InvalidArgument, match="bytes"):
        log.append(value)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        log.append_many([b"good", value])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument):
        log.append(b"x", key=value)  # type: ignore[arg-type]
    assert len(log) == 0


def test_bad_timestamps_and_headers_are_refused(log: Log) -> None:
    for timestamp in (1.5, "now", 2**63, TIMESTAMP_US_MIN - 1, TIMESTAMP_US_MAX + 1):
        with pytest.raises(InvalidArgument):
            log.append(b"x", timestamp=timestamp)  # type: ignore[arg-type]
    for headers in ({1: b"x"}, {"a": 5}, [("a",)], [b"a"], "ab", {"a": [b"x"]}):
        with pytest.raises(InvalidArgument):
            log.append(b"x", headers=headers)  # type: ignore[arg-type]
    assert len(log) == 0


def test_bytes_like_values_are_copied(log: Log) -> None:
    buffer = bytearray(b"first")
    log.append(buffer)  # type: ignore[arg-type]
    log.append(memoryview(b"view"))  # type: ignore[arg-type]
    buffer[:] = b"other"
    assert values(log) == [b"first", b"view"]


def test_large_messages(log: Log) -> None:
    large = os.urandom(MESSAGE_BYTES_MAX)
    log.append(b"small")
    log.append(large)
    log.append_many([b"x", large[: 1 << 20], b"y"])
    assert values(log) == [b"small", large, b"x", large[: 1 << 20], b"y"]
    with pytest.raises(MessageTooLarge):
        log.append(large + b"x")
    with pytest.raises(MessageTooLarge):
        log.append_many([large + b"x"])
    assert len(log) == 5


def test_a_log_outlives_its_process(path: Path) -> None:
    with Log(path, compression="zstd") as log:
        log.append_many([b"%d" % number for number in range(3000)])
    with Log(path) as log:
        assert log.append(b"next") == 3000
        assert values(log[2999:]) == [b"2999", b"next"]
        assert log.recovery.sound


def test_a_program_that_forgets_to_close_loses_nothing(path: Path) -> None:
    script = f"import headrace; log = headrace.Log({str(path)!r}, sync_every=None); log.append(b'kept')"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert values(Log(path, readonly=True)) == [b"kept"]


def test_what_waits_in_the_buffer_is_written_without_being_asked(path: Path) -> None:
    with Log(path, sync_every=0.01) as log, Log(path, readonly=True) as reader:
        log.append(b"x")
        assert reader.wait(0, timeout=10)
        assert values(reader) == [b"x"]


def test_without_sync_every_nothing_is_visible_before_flush(path: Path) -> None:
    with Log(path, sync_every=None) as log, Log(path, readonly=True) as reader:
        log.append(b"x")
        assert not reader.wait(0, timeout=0.05)
        assert log.flush(sync=False) == 1
        assert values(reader) == [b"x"]


def test_a_reader_lists_segments_again_when_all_it_saw_are_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer has begun another one and removed the rest, between the reader's listing and opening them."""
    listed = offline_reader.segment_bases

    def meanwhile(*where: Any) -> list[int]:
        bases = listed(*where)
        monkeypatch.setattr(offline_reader, "segment_bases", listed)
        begin_anew(b"c")
        return bases

    def begin_anew(value: bytes) -> None:
        log.truncate_before(log.next_offset)
        log.append_many([value])
        log.flush()

    with Log(path, sync_every=None) as log:
        begin_anew(b"a")
        with Log(path, readonly=True) as reader:
            begin_anew(b"b")
            monkeypatch.setattr(offline_reader, "segment_bases", meanwhile)
            with pytest.raises(OffsetOutOfRange, match="offset 1 is before the first one, 2"):
                values(reader.messages(1))
            assert values(reader) == [b"c"]


def test_tailing_waits_for_what_comes(log: Log) -> None:
    log.append(b"old")
    seen: list[bytes | None] = []

    def follow() -> None:
        for message in log.tail(0):
            seen.append(message.value)
            if message.value == b"end":
                return

    thread = threading.Thread(target=follow)
    thread.start()
    for value in (b"1", b"2", b"end"):
        log.append(value)
        log.flush()
    thread.join(10)
    assert seen == [b"old", b"1", b"2", b"end"]
    assert list(log.tail(timeout=0.01)) == []


def test_closing_ends_the_tail(log: Log) -> None:
    thread = threading.Thread(target=lambda: list(log.tail()))
    thread.start()
    time.sleep(0.05)
    log.close()
    thread.join(10)
    assert not thread.is_alive()


def test_cursors_are_independent_and_keep_their_place(path: Path) -> None:
    with Log(path) as log:
        log.append_many([b"%d" % number for number in range(10)])
        with log.cursor("slow") as slow, log.cursor("fast") as fast:
            assert values(fast) == values(log)
            fast.commit()
            iterator = iter(slow)
            next(iterator)
            next(iterator)
            slow.commit()
            next(iterator)
            assert (slow.offset, slow.committed, slow.lag, fast.lag) == (3, 2, 8, 0)
        assert log.cursors() == {"fast": 10, "slow": 2}
    with Log(path, readonly=True) as reader, reader.cursor("slow") as slow:
        assert next(iter(slow)).offset == 2
        slow.seek(7)
        assert next(iter(slow)).offset == 7
        slow.seek(time=0)
        assert next(iter(slow)).offset == 0
        slow.commit(5)
        assert reader.cursors()["slow"] == 5
        with pytest.raises(InvalidArgument):
            slow.seek(11)
        with pytest.raises(InvalidArgument):
            slow.seek()


def test_a_cursor_has_one_holder(log: Log) -> None:
    with log.cursor("mine"), pytest.raises(CursorInUse):
        log.cursor("mine")
    log.cursor("mine").close()
    with pytest.raises(InvalidArgument):
        log.cursor("../escape")


def test_consuming_takes_each_message_once(log: Log) -> None:
    log.append_many([b"%d" % number for number in range(5)])
    assert values(log.consume(2)) == [b"0", b"1"]
    assert values(log.consume()) == [b"2"]
    assert values(log.consume(10)) == [b"3", b"4"]
    assert log.consume(10) == []
    assert log.consume(1, timeout=0.01) == []
    with pytest.raises(InvalidArgument):
        log.consume(0)


def test_retention_by_size(path: Path) -> None:
    with Log(path, retain_bytes=1_000_000) as log:
        for _ in range(50):
            log.append_many([bytes(1000)] * 100)
        log.trim()
        assert log.info()["bytes"] < 1_300_000
        assert 3_000 < log.first_offset < 5_000


def test_retention_by_age(path: Path) -> None:
    with Log(path, retain_seconds=0.1) as log:
        for _ in range(20):
            log.append(b"old")
            log.flush(sync=False)
            time.sleep(0.02)
        time.sleep(0.15)
        log.append(b"new")
        log.flush()
        assert log.trim() > 0
        assert values(log)[-1] == b"new"


def test_messages_stay_until_every_cursor_has_passed(path: Path) -> None:
    log = Log(path, until_consumed=True, segment_bytes=4096)
    with log, log.cursor("a") as first, log.cursor("b") as second:
        for _ in range(10):
            log.append_many([bytes(1000)] * 10)
            log.flush(sync=False)
        list(first)
        first.commit()
        assert log.trim() == 0
        second.commit(50)
        assert log.trim() == 50
        list(second)
        second.commit()
        assert log.trim() == 100


def test_compaction_by_key(path: Path) -> None:
    with Log(path, segment_bytes=8192) as log:
        for number in range(300):
            log.append(b"%d" % number * 50, key=b"%d" % (number % 10))
            log.flush(sync=False)
        last = {message.key: message.offset for message in log}
        assert log.compact(lambda message: last[message.key] == message.offset) > 0
        assert {message.key: message.offset for message in log} == last
        assert len(list(log)) < 300
        with pytest.raises(MessageGone):
            log.read(0)
        assert log.read(299).key == b"9"


def test_truncating(log: Log) -> None:
    log.append_many([b"%d" % number for number in range(10)])
    log.truncate_before(4)
    assert (log.first_offset, len(log)) == (4, 6)
    assert log[4].value == b"4"
    with pytest.raises(OffsetOutOfRange):
        log.read(3)


def test_only_one_writes(path: Path) -> None:
    with Log(path) as log:
        with pytest.raises(LogInUse, match="readonly=True"):
            Log(path)
        log.append(b"x")
    with Log(path) as again:
        assert values(again) == [b"x"]


def test_a_reader_does_not_write(path: Path) -> None:
    Log(path).close()
    with Log(path, readonly=True) as reader:
        for action in (lambda: reader.append(b"x"), lambda: reader.append_many([b"x"]), reader.flush, reader.trim):
            with pytest.raises(LogReadOnly):
                action()


def test_what_is_not_there_is_not_made(path: Path) -> None:
    for options in ({"readonly": True}, {"create": False}):
        with pytest.raises(LogNotFound):
            Log(path, **options)  # type: ignore[arg-type]
    assert not path.exists()


def test_a_closed_log_says_so(log: Log) -> None:
    log.append(b"x")
    log.close()
    log.close()
    for action in (lambda: log.append(b"y"), log.flush, lambda: list(log), lambda: log[0], log.info):
        with pytest.raises(LogClosed):
            action()
    assert "closed" in repr(log)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "brotli"},
        {"sync_every": 0},
        {"sync_every": -1},
        {"retain_seconds": 0},
        {"retain_bytes": -5},
        {"segment_bytes": 1},
        {"segment_bytes": 1 << 40},
        {"segment_seconds": 0},
    ],
)
def test_settings_that_cannot_be(path: Path, options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Log(path, **options)  # type: ignore[arg-type]
    assert not path.exists()


def test_info_and_verify(log: Log) -> None:
    log.append_many([b"x"] * 100)
    info = log.info()
    assert (info["first_offset"], info["next_offset"], info["messages"]) == (0, 100, 100)
    assert log.verify().sound


def test_the_public_names() -> None:
    assert set(headrace.__all__) <= set(dir(headrace))
    assert headrace.HeadraceError.code == "error"
