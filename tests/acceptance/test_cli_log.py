"""The command line, used as a person or a script uses it: what does anything runs as a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.commands import Finished, run_command

from headrace import Log
from headrace.cli.main import main
from headrace.model.limits import TIMESTAMP_US_MAX

COMMAND = [sys.executable, "-m", "headrace.cli.main"]
SOON_S = 20.0


@pytest.fixture
def log(tmp_path: Path) -> str:
    """Where a log may be."""
    return str(tmp_path / "log")


def run(*arguments: str | bytes, stdin: bytes = b"", code: int = 0) -> Finished:
    """Run a command to its end, which must have this exit code and no traceback."""
    done = run_command(arguments, stdin, timeout_s=SOON_S)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == code, done.stderr.decode()
    return done


def told(*arguments: str, stdin: bytes = b"", code: int = 0) -> list[dict[str, Any]]:
    """What a command prints with --json."""
    return [json.loads(line) for line in run(*arguments, "--json", stdin=stdin, code=code).stdout.splitlines()]


def error_of(done: Finished) -> tuple[str, str]:
    """Text and code of the error on stderr."""
    found = re.fullmatch(r"headrace: (.+) \[(\w+)\]\n", done.stderr.decode())
    assert found, done.stderr
    return found[1], found[2]


@contextmanager
def started(*arguments: str, stdin: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    """A command at work, which is ended with the block if it has not by itself."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*COMMAND, *arguments], stdin=stdin, stdout=pipe, stderr=pipe) as process:
        watchdog = threading.Timer(SOON_S, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


def line_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def ended(process: subprocess.Popen[bytes], code: int) -> bytes:
    """Wait for the end, which must be a clean one; returns what was printed since."""
    out, errors = process.communicate(timeout=SOON_S)
    assert (process.returncode, errors) == (code, b"")
    return out


def values(path: str) -> list[bytes | None]:
    with Log(path, readonly=True) as reader:
        return [message.value for message in reader]


def filled(path: str, count: int) -> None:
    """A log with one batch for each thousand messages."""
    with Log(path) as writer:
        for first in range(0, count, 1000):
            writer.append_many([b"%d" % number for number in range(first, min(first + 1000, count))])
            writer.flush(sync=False)


def damage(path: str, position: int) -> None:
    segment = min(Path(path).glob("*.seg"))
    content = bytearray(segment.read_bytes())
    content[position] ^= 1
    segment.write_bytes(content)


# Help and wrong usage


def test_version_and_help() -> None:
    assert re.fullmatch(rb"headrace \S.*\n", run("--version").stdout)
    run("log", "read", code=2)
    text = run("--help").stdout.decode()
    assert "headrace log append" in text
    assert "exit codes" in text
    done = subprocess.run([sys.executable, "-m", "headrace", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout == text


@pytest.mark.parametrize("command", ["append", "read", "tail", "info", "verify", "repair", "bench"])
def test_every_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"  headrace log {command} " in text.partition("example")[2]
    assert "--json" in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "usage: headrace"),
        (["log"], "usage: headrace log"),
        (["log", "read"], "DIR"),
        (["log", "read", "d", "more"], "unrecognized arguments: more"),
        (["log", "read", "d", "--offset", "1", "--time", "2"], "not allowed with"),
        (["log", "read", "d", "--time", "yesterday"], "'yesterday' is not a time"),
        (["log", "tail", "d", "--limit", "many"], "'many' is not a whole number"),
        (["log", "append", "d", "--header", "lang"], "'lang' is not NAME=VALUE"),
        (["log", "append", "d", "x", "--file", "f"], "values or --file"),
        (["log", "append", "d", "--json-lines", "--key", "k"], "--json-lines"),
        (["log", "append", "d", "--sync-every", "0"], "above 0"),
    ],
)
def test_wrong_usage_is_explained_and_ends_with_2(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "d") if word == "d" else word for word in arguments]
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# Append and read


def test_what_is_appended_is_read(log: str) -> None:
    assert run("log", "append", log, "one", "zwei – ½").stdout == b"appended 2 messages, offsets 0 to 1\n"
    done = run("log", "append", log, "--key", "k", "three", "--header", "a=1=2", "--header", "b=", "--timestamp=0")
    assert done.stdout == b"appended 1 message, offset 2\n"
    lines = run("log", "read", log).stdout.decode().splitlines()
    assert [line.split("\t")[2:] for line in lines] == [["-", "one"], ["-", "zwei – ½"], ["k", "three", "a=1=2", "b="]]
    assert lines[2].startswith("2\t1970-01-01T00:00:00.000000Z\t")
    assert told("log", "read", log, "--offset", "2") == [
        {"offset": 2, "timestamp": 0, "key": "k", "value": "three", "headers": {"a": "1=2", "b": ""}}
    ]
    assert run("log", "read", log, "--values", "--limit", "2").stdout.decode() == "one\nzwei – ½\n"


def test_bytes_that_are_no_text(log: str) -> None:
    run("log", "append", log, b"\xff\x00"[:1], "--key", b"\xfe", "--header", b"h=\xfd", "--header", "t=x")
    run("log", "append", log, stdin=b"\x1b[31mred\ttab\nlast")
    odd, escape, last = told("log", "read", log)
    assert (odd["value_base64"], odd["key_base64"], odd["headers_base64"]) == ("/w==", "/g==", {"h": "/Q=="})
    assert odd["headers"] == {"t": "x"}
    assert (escape["value"], last["value"]) == ("\x1b[31mred\ttab", "last")
    text = run("log", "read", log).stdout.decode()
    assert "\t\\xfe\t\\xff\th=\\xfd\tt=x\n" in text
    assert "\t-\t\\x1b[31mred\\ttab\n" in text
    assert run("log", "read", log, "--values", "-0").stdout == b"\xff\0\x1b[31mred\ttab\0last\0"


def test_headers_that_repeat_and_hold_null(log: str) -> None:
    run("log", "append", log, "one", "--header", "a=1", "--header", "b=", "--header", "a=2")
    line = b'{"value": "two", "header_list": [{"name": "a", "value": null}, {"name": "a", "value_base64": "/w=="}]}\n'
    run("log", "append", log, "--json-lines", stdin=line + b'{"value": "three", "headers": {"a": null}}')
    one, two, three = told("log", "read", log)
    assert one["header_list"] == [
        {"name": "a", "value": "1"},
        {"name": "b", "value": ""},
        {"name": "a", "value": "2"},
    ]
    assert two["header_list"] == json.loads(line)["header_list"]
    assert (three["headers"], "header_list" in three) == ({"a": None}, False)
    lines = run("log", "read", log).stdout.decode().splitlines()
    assert [line.split("\t")[4:] for line in lines] == [["a=1", "b=", "a=2"], ["a", "a=\\xff"], ["a"]]
    for wrong in (
        b'{"value": "", "header_list": [], "headers": {}}',
        b'{"value": "", "header_list": [{"name": "a"}]}',
        b'{"value": "", "header_list": [{"name": "a", "value": "", "value_base64": ""}]}',
    ):
        assert error_of(run("log", "append", log, "--json-lines", stdin=wrong, code=1))[1] == "invalid_argument"


def test_stdin_files_and_separators(log: str, tmp_path: Path) -> None:
    assert told("log", "append", log, "-", stdin=b"a\n\nb\r\n") == [
        {"appended": 3, "first_offset": 0, "next_offset": 3, "synced": True, "interrupted": False}
    ]
    run("log", "append", log, "-0", stdin=b"c\nd\0e")
    (tmp_path / "f").write_bytes(b"whole\nfile\n")
    (tmp_path / "g").write_bytes(b"")
    run("log", "append", log, "--file", str(tmp_path / "f"), str(tmp_path / "g"), "--compression", "zstd")
    run("log", "append", log, "--", "-x", "--json")
    assert values(log) == [b"a", b"", b"b\r", b"c\nd", b"e", b"whole\nfile\n", b"", b"-x", b"--json"]
    assert run("log", "append", log).stdout == b"appended 0 messages\n"


def test_where_reading_begins_and_ends(log: str) -> None:
    with Log(log) as writer:
        for second in range(10):
            writer.append(b"%d" % second, timestamp=second * 1_000_000)

    def read(*arguments: str) -> bytes:
        return run("log", "read", log, "--values", *arguments).stdout.replace(b"\n", b"")

    assert read("--offset", "3", "--until", "6") == b"345"
    assert read("--time", "1970-01-01T00:00:07Z") == b"789"
    assert read("--time", "1970-01-01 01:00:07+01:00", "--limit", "2") == b"78"
    assert read("--time", "8000001") == b"9"
    assert read("--last", "2") == b"89"
    assert read("--offset", "10") == b""
    text, code = error_of(run("log", "read", log, "--offset", "11", code=1))
    assert code == "offset_out_of_range"
    assert "the log has offsets 0 to 9" in text


def test_a_log_is_copied_through_a_pipe(log: str, tmp_path: Path) -> None:
    copy = str(tmp_path / "copy")
    with Log(log) as writer:
        writer.append_many([b"plain %d" % number for number in range(2000)])
        writer.append(None, key=b"gone")
        writer.append(b"", key=b"")
        writer.append("größer".encode(), b"\xff", {"text": "ü", "bytes": b"\x80", "": b""}, -1)
        writer.append(b'{"json": "\\u0000"}\r\n\0\xe2\x80\xa8', timestamp=TIMESTAMP_US_MAX)
    with started("log", "read", log, "--json") as reading:
        assert reading.stdout is not None
        appending = subprocess.run(
            [*COMMAND, "log", "append", copy, "--json-lines"], stdin=reading.stdout, capture_output=True, check=True
        )
    assert appending.stdout == b"appended 2,004 messages, offsets 0 to 2003\n"
    with Log(log, readonly=True) as original, Log(copy, readonly=True) as copied:
        assert list(original) == list(copied)


def test_a_bad_line_of_json_is_named_and_those_before_it_are_kept(log: str) -> None:
    done = run("log", "append", log, "--json-lines", stdin=b'{"value": "a"}\n\n{"value": 1}\n{"value": "b"}\n', code=1)
    assert done.stdout == b"appended 1 message, offset 0\n"
    assert error_of(done)[0].startswith("line 3 of stdin: ")
    for line in (
        b"{}",
        b'{"value": "a", "value_base64": ""}',
        b'{"value": "a", "prize": 1}',
        b'{"value": "a", "due": 1}',
    ):
        assert error_of(run("log", "append", log, "--json-lines", stdin=line, code=1))[1] == "invalid_argument"
    assert values(log) == [b"a"]


def test_cursor_goes_on_where_it_ended(log: str) -> None:
    filled(log, 5)
    read = ("log", "read", log, "--values", "--cursor", "billing")
    assert run(*read, "--limit", "2").stdout == b"0\n1\n"
    assert run(*read).stdout == b"2\n3\n4\n"
    assert run(*read).stdout == b""
    run("log", "append", log, "5")
    assert told("log", "info", log)[0]["cursors"] == {"billing": {"offset": 5, "lag": 1}}
    tail = ("log", "tail", log, "--values", "--cursor", "billing", "--timeout", "0.1")
    assert run(*tail).stdout == b"5\n"
    assert run(*tail).stdout == b""
    assert run(*read, "--offset", "4").stdout == b"4\n5\n"
    with Log(log, readonly=True) as reader, reader.cursor("billing"):
        assert error_of(run(*read, code=1))[1] == "cursor_in_use"


# Tail


def test_tail_follows_what_another_process_appends(log: str) -> None:
    filled(log, 2)
    with (
        started("log", "tail", log, "--last", "1", "--limit", "3", "--values") as tail,
        started("log", "append", log, stdin=subprocess.PIPE) as append,
    ):
        assert line_of(tail) == b"1\n"
        assert append.stdin is not None
        append.stdin.write(b"two\n")
        append.stdin.flush()
        assert line_of(tail) == b"two\n"  # while stdin is still open
        append.stdin.write(b"three\n")
        append.stdin.flush()
        assert ended(tail, 0) == b"three\n"
        assert ended(append, 0) == b"appended 2 messages, offsets 2 to 3\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_tail_ends_cleanly_on_a_signal(log: str, number: signal.Signals, code: int) -> None:
    filled(log, 2)
    with started("log", "tail", log, "--last", "1", "--json", "--cursor", "c") as tail:
        assert json.loads(line_of(tail))["offset"] == 1
        time.sleep(0.1)
        tail.send_signal(number)
        assert ended(tail, code) == b""
    assert told("log", "info", log)[0]["cursors"] == {"c": {"offset": 2, "lag": 0}}


def test_tail_ends_when_nobody_reads_it_even_if_nothing_comes(log: str) -> None:
    filled(log, 2)
    with started("log", "tail", log, "--last", "2") as tail:
        line_of(tail)
        assert tail.stdout is not None
        tail.stdout.close()
        assert tail.stderr is not None
        assert tail.stderr.read() == b""
        assert tail.wait(SOON_S) == 0


def test_read_into_a_closed_pipe_is_no_error(log: str) -> None:
    filled(log, 100_000)
    with started("log", "read", log) as read:
        line_of(read)
        assert read.stdout is not None
        read.stdout.close()
        assert read.stderr is not None
        assert read.stderr.read() == b""
        assert read.wait(SOON_S) == 0


# Append ends early


def test_an_interrupted_append_keeps_what_it_took(log: str) -> None:
    with started("log", "append", log, "--sync-every", "60", stdin=subprocess.PIPE) as append:
        assert append.stdin is not None
        append.stdin.write(b"a\nb\nunfinis")
        append.stdin.flush()
        while not os.path.exists(log):
            time.sleep(0.01)
        time.sleep(0.5)
        append.send_signal(signal.SIGTERM)
        assert ended(append, 143) == b"interrupted; appended 2 messages, offsets 0 to 1, all synced\n"
    assert values(log) == [b"a", b"b"]


def test_a_second_writer_is_refused(log: str) -> None:
    with Log(log):
        for command in (("append", log, "x"), ("repair", log)):
            text, code = error_of(run("log", *command, code=1))
            assert code == "log_in_use"
            assert log in text
        done = run("log", "append", log, "x", "--json", code=1)
        assert told("log", "info", log)[0]["writer"] is True
    error = json.loads(done.stderr)["error"]
    assert (error["code"], error["retryable"]) == ("log_in_use", True)


def test_a_disk_that_fails_is_told_without_a_traceback(log: str) -> None:
    limited = ["sh", "-c", 'ulimit -f 800; exec "$@"', "sh", *COMMAND]
    lines = b"".join(b"%0100d\n" % number for number in range(50_000))
    done = subprocess.run([*limited, "log", "append", log, "--json"], input=lines, capture_output=True, check=False)
    assert done.returncode == 1
    outcome, error = json.loads(done.stdout), json.loads(done.stderr)["error"]
    assert error["code"] == "log_failed"
    assert outcome["synced"] is False
    assert 0 < outcome["appended"] < 50_000
    assert [int(value or b"") for value in values(log)] == list(range(outcome["appended"]))


def test_what_cannot_be_appended(log: str, tmp_path: Path) -> None:
    text, code = error_of(run("log", "append", log, "--file", str(tmp_path / "none"), code=1))
    assert (text, code) == (f"{tmp_path}/none: No such file or directory", "system_error")
    assert error_of(run("log", "append", log, stdin=bytes(17 << 20), code=1))[1] == "message_too_large"


# Info, verify, repair


def test_there_is_no_log(log: str, tmp_path: Path) -> None:
    for command in ("read", "tail", "info", "verify", "repair"):
        text, code = error_of(run("log", command, log, code=1))
        assert code == "log_not_found"
        assert f"headrace log append {log} VALUE" in text
    assert list(tmp_path.iterdir()) == []
    error = json.loads(run("log", "read", log, "--json", code=1).stderr)["error"]
    assert (error["code"], error["retryable"]) == ("log_not_found", False)


def test_an_empty_log(log: str) -> None:
    run("log", "append", log)
    assert run("log", "read", log).stdout == b""
    assert run("log", "tail", log, "--timeout", "0.1").stdout == b""
    (info,) = told("log", "info", log)
    assert (info["messages"], info["oldest_timestamp"], info["newest_timestamp"]) == (0, None, None)
    assert "none; the next is 0" in run("log", "info", log).stdout.decode()
    assert run("log", "verify", log).stdout.endswith(b"\nsound\n")
    assert run("log", "repair", log).stdout.endswith(b"\nnothing to repair\n")


def test_info(log: str) -> None:
    with Log(log, segment_bytes=4096) as writer:
        for second in range(100):
            writer.append(bytes(100), timestamp=second * 1_000_000)
            writer.flush(sync=False)
        with writer.cursor("slow") as cursor:
            cursor.commit(40)
        (info,) = told("log", "info", log)
    assert (info["first_offset"], info["next_offset"], info["messages"]) == (0, 100, 100)
    assert (info["oldest_timestamp"], info["newest_timestamp"]) == (0, 99_000_000)
    assert info["cursors"] == {"slow": {"offset": 40, "lag": 60}}
    assert info["writer"] is True
    assert info["segments"] == len(list(Path(log).glob("*.seg"))) > 1
    text = run("log", "info", log).stdout.decode()
    for line in ("offsets   0 to 99", "newest    1970-01-01T00:01:39.000000Z", "writer    none", "40, 60 behind"):
        assert line in text


def test_damage_is_found_then_set_aside_then_passed_over(log: str) -> None:
    filled(log, 3000)
    assert told("log", "verify", log)[0]["sound"] is True
    damage(log, 1000)
    done = run("log", "verify", log, code=3)
    assert b"damaged: offsets 0 to 999 (" in done.stdout
    (found,) = told("log", "verify", log, code=3)
    assert [(lost["first_offset"], lost["next_offset"]) for lost in found["damaged"]] == [(0, 1000)]
    text, code = error_of(run("log", "read", log, code=1))
    assert code == "corrupt_batch"
    assert "--offset 1000" in text

    (repaired,) = told("log", "repair", log)
    (lost,) = repaired["lost"]
    assert (lost["first_offset"], lost["next_offset"], repaired["changed"]) == (0, 1000, True)
    assert lost["kept_in"].startswith(repaired["quarantine"])
    assert Path(lost["kept_in"]).stat().st_size > 1000
    (sound,) = told("log", "verify", log)
    assert [lost["messages"] for lost in sound["lost_earlier"]] == [1000]
    assert b"lost earlier: offsets 0 to 999\nsound\n" in run("log", "verify", log).stdout
    assert told("log", "repair", log)[0]["changed"] is False

    skipping = run("log", "read", log, "--skip-corrupt", "--values", "--cursor", "c")
    assert skipping.stdout.split() == [b"%d" % number for number in range(1000, 3000)]
    assert told("log", "info", log)[0]["cursors"] == {"c": {"offset": 3000, "lag": 0}}


def test_messages_before_damage_are_printed(log: str) -> None:
    filled(log, 3000)
    damage(log, Path(log, f"{0:020d}.seg").stat().st_size // 2)
    done = run("log", "read", log, "--values", "--cursor", "c", code=1)
    assert done.stdout.split() == [b"%d" % number for number in range(1000)]
    assert error_of(done)[1] == "corrupt_batch"
    tail = run("log", "tail", log, "--offset", "999", "--values", "--skip-corrupt", "--limit", "2")
    assert tail.stdout == b"999\n2000\n"


def test_repair_says_what_it_cut(log: str) -> None:
    filled(log, 10)
    with Path(log, f"{0:020d}.seg").open("ab") as segment:
        segment.write(b"half a batch")
    text = run("log", "repair", log).stdout.decode()
    assert "cut: 12 bytes of an unfinished write at offset 10\n" in text
    assert f"{log}/quarantine" in text
    assert len(values(log)) == 10


# Bench


def test_bench_measures_in_a_directory_and_leaves_nothing(tmp_path: Path) -> None:
    quickly = ("--seconds", "0.001", "--size", "10", "--batch", "10")
    rows = told("log", "bench", str(tmp_path), *quickly)
    assert {row["name"].rpartition(".")[2] for row in rows} >= {"append_written", "append_synced", "read_list"}
    assert all(row["median"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_bench_runs_nothing_that_is_in_the_current_directory(tmp_path: Path) -> None:
    here, script = tmp_path / "here", tmp_path / "headrace-script"
    here.mkdir()
    for name in ("re", "json", "pickle", "msgspec", "headrace"):
        (here / f"{name}.py").write_text("raise SystemExit('a file of the user ran')")
    # As an installed command runs: its own directory is on the path, and not the current one.
    script.write_text(
        "import sys\nfrom headrace.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())"
    )
    command = [sys.executable, script, "log", "bench", ".", "--seconds", "0.001", "--json"]
    done = subprocess.run(command, cwd=here, capture_output=True, timeout=SOON_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert [json.loads(line)["median"] > 0 for line in done.stdout.splitlines()]


def test_bench_needs_no_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started("log", "bench", "--seconds", "0.001") as bench:
        assert line_of(bench).split() == [b"benchmark", b"of", b"median", b"lowest", b"highest", b"unit"]
        assert re.match(rb"append_written +\w+( +[\d,.]+){3}  msg/s\n", line_of(bench))
        bench.send_signal(signal.SIGTERM)
        ended(bench, 143)
    assert list(tmp_path.iterdir()) == []
