"""The commands that talk to a broker, used as a person or a script uses them: every one a process of its own."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.commands import Finished, run_command

from headrace.bench import brokers
from headrace.bench import run as bench_run
from headrace.cli.main import main
from headrace.cli.setting_options import field_explanations
from headrace.model.topic import TopicSettings

COMMAND = [sys.executable, "-m", "headrace"]
SOON_S = 30.0


def run(*arguments: str | bytes, stdin: bytes = b"", code: int = 0) -> Finished:
    """Run a command to its end, which must have this exit code and no traceback."""
    done = run_command(arguments, stdin, timeout_s=SOON_S)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == code, done.stderr.decode()
    return done


def text_of(*arguments: str, stdin: bytes = b"") -> str:
    """What a command prints."""
    return run(*arguments, stdin=stdin).stdout.decode()


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


@contextmanager
def serving(data: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A broker at work."""
    command = [*COMMAND, "serve", "--data", str(data), "--port", "0", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert b"ready" in line_of(process)
            yield process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker that the tests share, where the commands look for it."""
    data = tmp_path_factory.mktemp("broker") / "data"
    url = f"headrace+unix://{data}/headrace.sock"
    with serving(data), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_URL", url)
        yield url


@pytest.fixture
def topic(broker: str, request: pytest.FixtureRequest) -> str:
    """A name for a topic that no other test uses."""
    assert broker
    return re.sub(r"\W", "-", request.node.name).strip("-")[:100]


def values(topic: str, *arguments: str) -> list[bytes]:
    """The values in a topic."""
    return run("tail", topic, "--no-follow", "--values", *arguments).stdout.split(b"\n")[:-1]


# Help and wrong usage

ALL = ["topic create", "topic list", "topic describe", "topic alter", "topic delete", "publish", "tail"]
ALL += ["group list", "group describe", "group seek", "group delete"]


@pytest.mark.parametrize("command", ALL)
def test_every_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"  headrace {command}" in text.partition("example")[2]
    for option in ("--json", "--connect"):
        assert option in text


def test_help_shows_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("serve", "topic", "publish", "tail", "group", "bench", "log", "completion"):
        assert re.search(rf"^  {command} +\w", text, re.MULTILINE)


def test_every_setting_of_a_topic_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    explained = field_explanations(TopicSettings)
    for command in ("create", "alter"):
        main(["topic", command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        for field in msgspec.structs.fields(TopicSettings):
            assert f"--{field.name.replace('_', '-')}" in text
            assert explained[field.name].rstrip(".") in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["topic"], "usage: headrace topic"),
        (["topic", "create"], "NAME"),
        (["topic", "create", "t", "--retain-bytes", "10G"], "'10G' is not a size; give one like 10GB"),
        (["topic", "create", "t", "--retain-seconds", "soon"], "'soon' is not a time span; give one like 30s"),
        (["topic", "create", "t", "--storage", "paper"], "invalid choice: 'paper'"),
        (["topic", "alter", "t"], "at least one setting"),
        (["topic", "create", "t", "--view-of", "o"], "needs one of --where-exact"),
        (["topic", "create", "t", "--where-regex", "o"], "needs --view-of"),
        (["topic", "create", "t", "--view-of", "o", "--where-exact", "{"], "is not JSON"),
        (["topic", "create", "t", "--where-regex", "o", "--where-jsonpath", "$"], "not allowed with"),
        (["publish", "t", "x", "--file", "f"], "values or --file"),
        (["publish", "t", "x", "-0"], "-0 applies to stdin"),
        (["publish", "t", "--json-lines", "--key", "k"], "--json-lines"),
        (["publish", "t", "--key", "k", "--key-separator", ":"], "--key-separator"),
        (["tail"], "TOPIC"),
        (["tail", "t", "--from", "yesterday"], "'yesterday' is no position in a topic"),
        (["tail", "t", "-0"], "--values"),
        (["tail", "t", "--group", "g", "--partition", "1"], "--group"),
        (["group", "seek", "g", "t"], "--to"),
        (["tail", "t", "--timeout", "0"], "'0' is not a time span"),
        (["completion", "csh"], "invalid choice: 'csh'"),
    ],
)
def test_wrong_usage_is_explained_and_ends_with_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err


def test_without_a_broker(tmp_path: Path) -> None:
    url = f"headrace+unix://{tmp_path}/none.sock"
    for arguments in (["topic", "list"], ["publish", "t", "x"], ["tail", "t"], ["group", "list"]):
        text, code = error_of(run(*arguments, "--connect", url, code=1))
        assert code == "connection_failed"
        assert url in text
        assert "headrace serve" in text
    error = json.loads(run("topic", "list", "--connect", url, "--json", code=1).stderr)["error"]
    assert (error["code"], error["retryable"]) == ("connection_failed", True)
    assert b"'somewhere' is no address" in run("topic", "list", "--connect", "somewhere", code=2).stderr


# Topics


def test_life_of_a_topic(topic: str) -> None:
    (made,) = told("topic", "create", topic, "--partitions", "2", "--retain-seconds", "7d", "--retain-bytes", "10GB")
    assert (made["topic"], len(made["partitions"])) == (topic, 2)
    assert (made["settings"]["retain_seconds"], made["settings"]["retain_bytes"]) == (604800, 10_000_000_000)
    text, code = error_of(run("topic", "create", topic, code=1))
    assert code == "topic_exists"
    assert "--exist-ok" in text
    run("topic", "create", topic, "--exist-ok")
    assert text_of("topic", "alter", topic, "--retain-bytes", "none", "--partitions", "3", "--compact-by-key") == (
        f"topic {topic}: retain_bytes none, partitions 3, compact_by_key yes\n"
    )
    text = text_of("topic", "describe", topic)
    assert re.search(r"^retain_seconds +7d$", text, re.MULTILINE)
    assert re.search(r"^ +2 +0 +0 +0 +0$", text, re.MULTILINE)
    (described,) = told("topic", "describe", topic)
    assert described["settings"] | {"partitions": 2} == made["settings"] | {
        "retain_bytes": None,
        "compact_by_key": True,
    }
    assert [each["topic"] for each in told("topic", "list", f"{topic[:-1]}?")] == [topic]
    assert re.search(rf"^{topic} +3  disk +for 7d, last of each key +synced$", text_of("topic", "list"), re.MULTILINE)
    assert topic in text_of("topic", "list", "--names").splitlines()

    assert run("topic", "delete", topic, code=2).stderr.endswith(b"give --yes\n")
    assert text_of("topic", "delete", topic, "--yes") == f"deleted topic {topic}\n"
    text, code = error_of(run("topic", "describe", topic, code=1))
    assert code == "topic_not_found"
    assert "headrace topic list" in text


def test_middleware_of_a_topic(topic: str, tmp_path: Path) -> None:
    compress = '[{"name": "compress", "codec": "lz4"}]'
    (made,) = told("topic", "create", topic, "--middleware", compress)
    assert made["settings"]["middleware"] == [{"name": "compress", "codec": "lz4"}]
    described = text_of("topic", "describe", topic)
    assert re.search(r'^middleware +\[\{"name": "compress", "codec": "lz4"\}\]$', described, re.MULTILINE)
    file = tmp_path / "middleware.json"
    file.write_text('{"name": "redact", "fields": ["$.card"]}')
    (altered,) = told("topic", "alter", topic, "--middleware", str(file))
    assert altered["settings"]["middleware"] == [{"name": "redact", "fields": ["$.card"]}]
    run("publish", topic, '{"card": 4111}')
    assert values(topic) == [b'{"card":"***"}']
    assert text_of("topic", "alter", topic, "--middleware", "none") == f"topic {topic}: middleware none\n"
    for wrong, text in (("nowhere.json", "nor a file"), ("[", "no JSON")):
        assert text.encode() in run("topic", "alter", topic, "--middleware", wrong, code=2).stderr
    text, code = error_of(run("topic", "alter", topic, "--middleware", '[{"name": "nothing"}]', code=1))
    assert code == "plugin_unavailable"
    assert "there is no plug-in 'nothing'" in text


def test_life_of_a_view(topic: str) -> None:
    view = f"{topic}-view"
    run("topic", "create", topic)
    text = text_of("topic", "create", view, "--view-of", topic, "--where-jsonpath", "$[?$.amount > 10]")
    assert text == f"topic {view}: view of {topic} where jsonpath $[?$.amount > 10], 1 partition\n"
    for kind, query in (("exact", "[1]"), ("partial", '{"amount": 5}'), ("regex", "mount")):
        [made] = told("topic", "create", f"{view}-{kind}", "--view-of", topic, f"--where-{kind}", query)
        argument = query if kind == "regex" else json.loads(query)
        assert made["settings"]["view_query"] == {kind: argument}
    run("topic", "create", f"{view}-query", "--view-of", topic, "--view-query", '{"regex": "a"}')
    for line in ('{"amount": 5}', '{"amount": 50}', "no JSON"):
        run("publish", topic, line)
    assert values(view) == [b'{"amount": 50}']
    assert values(f"{view}-partial") == [b'{"amount": 5}']
    assert values(f"{view}-regex", "--from", "1") == [b'{"amount": 50}']
    assert run("queue", "drain", view, "--values").stdout == b'{"amount": 50}\n'
    [described] = told("topic", "describe", view)
    assert (described["settings"]["view_of"], described["view_failed"]) == (topic, 0)
    assert f"view of  {topic}\nwhere    jsonpath $[?$.amount > 10]\n" in text_of("topic", "describe", view)
    assert f"views    {view}, " in text_of("topic", "describe", topic)
    assert re.search(rf"^{view} +1 +view +as {topic} ", text_of("topic", "list", f"{view}*"), re.MULTILINE)
    assert error_of(run("publish", view, "x", code=1))[1] == "topic_is_view"
    assert error_of(run("topic", "delete", topic, "--yes", code=1))[1] == "topic_has_views"
    text, code = error_of(run("topic", "create", "other", "--view-of", topic, "--where-regex", "(", code=1))
    assert code == "invalid_content_query"


def test_settings_that_cannot_be(topic: str) -> None:
    for wrong in (["--validity", "ttl"], ["--partitions", "0"], ["--storage", "memory", "--durability", "synced"]):
        assert error_of(run("topic", "create", topic, *wrong, code=1))[1] == "invalid_argument"
    assert error_of(run("topic", "create", "no,topic", code=1))[1] == "invalid_argument"
    assert text_of("topic", "list", topic) == ""


@pytest.mark.parametrize(("answer", "deleted"), [("y\n", True), ("\n", False), ("no\n", False)])
def test_delete_asks_on_a_terminal(topic: str, answer: str, deleted: bool) -> None:
    run("topic", "create", topic)
    run("publish", topic, "a", "b")
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "topic", "delete", topic], stdin=follower, stderr=follower, stdout=subprocess.PIPE
    ) as process:
        os.close(follower)
        asked = b""
        while not asked.endswith(b"[y/N] "):
            asked += os.read(leader, 1000)
        assert f"Delete topic {topic} with 2 messages?".encode() in asked
        os.write(leader, answer.encode())
        out, _ = process.communicate(timeout=SOON_S)
    os.close(leader)
    assert (process.returncode, bool(out)) == ((0, True) if deleted else (1, False))
    assert bool(told("topic", "list", topic)) is not deleted


# Publish and tail


def test_what_is_published_is_read(topic: str) -> None:
    run("topic", "create", topic)
    assert text_of("publish", topic, "one", "zwei – ½") == (
        f"published 2 messages to {topic}, synced: partition 0, offsets 0 to 1\n"
    )
    run("publish", topic, "--key", "k", "three", "--header", "a=1=2", "--header", "b=", "--timestamp=0")
    lines = text_of("tail", topic, "--no-follow").splitlines()
    assert [line.split("\t")[2:] for line in lines] == [["-", "one"], ["-", "zwei – ½"], ["k", "three", "a=1=2", "b="]]
    assert lines[2].startswith("0:2\t1970-01-01T00:00:00.000000Z\t")
    assert told("tail", topic, "--no-follow", "--from", "2") == [
        {
            "topic": topic,
            "partition": 0,
            "offset": 2,
            "timestamp": 0,
            "key": "k",
            "value": "three",
            "headers": {"a": "1=2", "b": ""},
        }
    ]
    assert told("publish", topic, "four") == [
        {
            "topic": topic,
            "published": 1,
            "durability": "synced",
            "interrupted": False,
            "partitions": [{"partition": 0, "messages": 1, "first_offset": 3, "next_offset": 4}],
        }
    ]


def test_bytes_that_are_no_text(topic: str) -> None:
    run("topic", "create", topic)
    run("publish", topic, b"\xff", "--key", b"\xfe", "--header", b"h=\xfd", "--header", "t=x")
    run("publish", topic, stdin=b"\x1b[31mred\ttab\nlast")
    odd, escape, last = told("tail", topic, "--no-follow")
    assert (odd["value_base64"], odd["key_base64"], odd["headers_base64"]) == ("/w==", "/g==", {"h": "/Q=="})
    assert (escape["value"], last["value"]) == ("\x1b[31mred\ttab", "last")
    text = text_of("tail", topic, "--no-follow")
    assert "\t\\xfe\t\\xff\th=\\xfd\tt=x\n" in text
    assert "\t-\t\\x1b[31mred\\ttab\n" in text
    assert run("tail", topic, "--no-follow", "--values", "-0").stdout == b"\xff\0\x1b[31mred\ttab\0last\0"


def test_names_with_any_sign(topic: str) -> None:
    name = f'_größe "{topic}" \\ $(x) 100%'
    run("topic", "create", name)
    assert text_of("publish", name, "one").startswith(f"published 1 message to {name}, synced")
    assert [line["topic"] for line in told("tail", name, "--no-follow")] == [name]
    assert name in text_of("topic", "list", "--names").splitlines()
    assert [line["topic"] for line in told("topic", "list", f"_gr??e*{topic}*")] == [name]
    run("tail", name, "--no-follow", "--group", name)
    assert name in text_of("group", "list", "--names").splitlines()
    run("topic", "delete", name, "--yes")
    missing = run("topic", "describe", name, code=1).stderr.decode()
    assert f"`headrace topic create {shlex.quote(name)}`" in missing


def test_headers_that_repeat_and_hold_null(topic: str) -> None:
    run("topic", "create", topic)
    run("publish", topic, "one", "--header", "a=1", "--header", "b=", "--header", "a=2")
    line = b'{"value": "two", "header_list": [{"name": "a", "value": null}, {"name": "a", "value_base64": "/w=="}]}\n'
    run("publish", topic, "--json-lines", stdin=line + b'{"value": "three", "headers": {"a": null}}')
    one, two, three = told("tail", topic, "--no-follow")
    assert one["header_list"] == [
        {"name": "a", "value": "1"},
        {"name": "b", "value": ""},
        {"name": "a", "value": "2"},
    ]
    assert two["header_list"] == json.loads(line)["header_list"]
    assert (three["headers"], "header_list" in three) == ({"a": None}, False)
    lines = run("tail", topic, "--no-follow").stdout.decode().splitlines()
    assert [line.split("\t")[4:] for line in lines] == [["a=1", "b=", "a=2"], ["a", "a=\\xff"], ["a"]]
    for wrong in (
        b'{"value": "", "header_list": [], "headers": {}}',
        b'{"value": "", "header_list": [{"name": "a"}]}',
        b'{"value": "", "header_list": [{"name": "a", "value": "", "value_base64": ""}]}',
    ):
        assert error_of(run("publish", topic, "--json-lines", stdin=wrong, code=1))[1] == "invalid_argument"


def test_stdin_files_and_separators(topic: str, tmp_path: Path) -> None:
    run("topic", "create", topic)
    assert told("publish", topic, "-", stdin=b"a\n\nb\r\n")[0]["published"] == 3
    run("publish", topic, "-0", stdin=b"c\nd\0e")
    (tmp_path / "f").write_bytes(b"whole file")
    (tmp_path / "g").write_bytes(b"")
    run("publish", topic, "--file", str(tmp_path / "f"), str(tmp_path / "g"), "--compression", "zstd")
    run("publish", topic, "--", "-x", "--json")
    assert run("tail", topic, "--no-follow", "--values", "-0").stdout.split(b"\0")[:-1] == [
        *(b"a", b"", b"b\r", b"c\nd", b"e", b"whole file", b"", b"-x", b"--json")
    ]
    assert text_of("publish", topic) == f"published 0 messages to {topic}\n"


def test_keys_from_lines_and_where_they_go(topic: str) -> None:
    run("topic", "create", topic, "--partitions", "4")
    lines = b"".join(b"k%d::v%d\n" % (number % 7, number) for number in range(100))
    (outcome,) = told("publish", topic, "--key-separator", "::", stdin=lines)
    assert (outcome["published"], sum(each["messages"] for each in outcome["partitions"])) == (100, 100)
    places: dict[str, set[int]] = {}
    for message in told("tail", topic, "--no-follow"):
        places.setdefault(message["key"], set()).add(message["partition"])
    assert sorted(places) == [f"k{number}" for number in range(7)]
    assert all(len(found) == 1 for found in places.values())
    done = run("publish", topic, "--key-separator", "::", stdin=b"k::v\nplain\n", code=1)
    assert "'plain' has no '::'" in error_of(done)[0]
    assert text_of("publish", topic, "here", "--partition", "3").split(": ")[1].startswith("partition 3, ")
    assert values(topic, "--partition", "3")[-1] == b"here"
    assert error_of(run("publish", topic, "x", "--partition", "4", code=1))[1] == "partition_not_found"


def test_many_lines_are_published_in_order(topic: str) -> None:
    run("topic", "create", topic)
    lines = [b"%d" % number for number in range(200_000)]
    assert text_of("publish", topic, stdin=b"\n".join(lines)) == (
        f"published 200,000 messages to {topic}, synced: partition 0, offsets 0 to 199999\n"
    )
    assert values(topic) == lines


def test_expected_offset(topic: str) -> None:
    run("topic", "create", topic)
    run("publish", topic, "a", "b", "--expected-offset", "0")
    assert error_of(run("publish", topic, "c", "--expected-offset", "0", code=1))[1] == "unexpected_offset"
    run("publish", topic, "c", "--expected-offset", "2")
    assert values(topic) == [b"a", b"b", b"c"]


def test_versions_of_a_key(topic: str) -> None:
    missing = run("publish", topic, "opened", "--key", "ann", "--expected-version", "0", code=1)
    assert error_of(missing)[1] == "topic_not_found", "none is created that could not count versions"
    run("topic", "create", topic, "--key-versions", "--partitions", "3")
    run("publish", topic, "opened", "paid", "--key", "ann", "--expected-version", "0")
    run("publish", topic, "--key", "ann", "--expected-version", "2", stdin=b"in\nout\n")
    stale = run("publish", topic, "again", "--key", "ann", "--expected-version", "3", code=1)
    assert error_of(stale)[1] == "unexpected_version"
    assert run("topic", "history", topic, "ann", "--values").stdout == b"opened\npaid\nin\nout\n"
    lines = text_of("topic", "history", topic, "ann", "--start-version", "2", "-n", "1").splitlines()
    assert len(lines) == 1
    assert lines[0].split("\t")[::4] == ["2", "in"]
    rows = [json.loads(line) for line in run("topic", "history", topic, "ann", "--json").stdout.splitlines()]
    assert [(row["version"], row["key"], row["value"]) for row in rows] == [
        (0, "ann", "opened"),
        (1, "ann", "paid"),
        (2, "ann", "in"),
        (3, "ann", "out"),
    ]
    assert run("topic", "history", topic, "eve").stdout == b""
    assert run("publish", topic, "x", "--expected-version", "0", code=2).stderr
    assert error_of(run("topic", "history", "no-such-topic", "ann", code=1))[1] == "topic_not_found"


def test_messages_that_expire(topic: str) -> None:
    run("topic", "create", topic)
    run("publish", topic, "old", "--expires", "1m ago")
    run("publish", topic, "new", "--expires", "in 1h", "--priority", "3", "--due", "2030-01-01")
    (message,) = told("tail", topic, "--no-follow")
    assert (message["value"], message["priority"], message["due"]) == ("new", 3, 1_893_456_000_000_000)


def test_where_reading_begins_and_ends(topic: str) -> None:
    run("topic", "create", topic)
    for second in range(5):
        run("publish", topic, str(second), "--timestamp", str(second * 1_000_000))

    def read(*arguments: str) -> bytes:
        return b"".join(values(topic, *arguments))

    assert read("--from", "3") == b"34"
    assert read("--from", "1970-01-01T00:00:02Z") == b"234"
    assert read("--from", "5m ago") == b""
    assert read("--from", "latest") == b""
    assert read("--from", "earliest", "-n", "2") == b"01"
    assert read("--last", "2") == b"34"
    assert read("--last", "20") == b"01234"
    text, code = error_of(run("tail", topic, "--no-follow", "--from", "6", code=1))
    assert (code, "has offsets 0 to 4" in text) == ("offset_out_of_range", True)


def test_several_topics_and_patterns(topic: str) -> None:
    for name in ("b", "a"):
        run("topic", "create", f"{topic}.{name}", "--partitions", "2")
        run("publish", f"{topic}.{name}", f"of {name}", "--timestamp", "0" if name == "b" else "1")
    lines = text_of("tail", f"{topic}.a", f"{topic}.b", "--no-follow").splitlines()
    assert [line.split("\t")[0] for line in lines] == [f"{topic}.b", f"{topic}.a"]  # in the order of their times
    found = told("tail", "--pattern", f"{topic}.*", "-n", "2", "--from", "earliest")
    assert sorted(message["value"] for message in found) == ["of a", "of b"]
    assert text_of("tail", "--pattern", f"{topic}.*", "--no-follow").splitlines() == lines


def test_a_topic_is_copied_through_a_pipe(topic: str) -> None:
    copy = f"{topic}-copy"
    for name in (topic, copy):
        run("topic", "create", name)
    run("publish", topic, stdin=b"".join(b"plain %d\n" % number for number in range(2000)))
    run(
        "publish",
        topic,
        "--json-lines",
        stdin=b'{"value":null,"key":"gone"}\n{"value_base64":"/w==","key":"","due":5}\n',
    )
    with started("tail", topic, "--json", "--no-follow") as tail:
        assert tail.stdout is not None
        subprocess.run(
            [*COMMAND, "publish", copy, "--json-lines"], stdin=tail.stdout, stdout=subprocess.DEVNULL, check=True
        )
    assert [each | {"topic": copy} for each in told("tail", topic, "--no-follow")] == told("tail", copy, "--no-follow")


def test_a_bad_line_of_json_is_named_and_those_before_it_are_kept(topic: str) -> None:
    run("topic", "create", topic)
    lines = b'{"value": "a"}\n\n{"value": 1}\n{"value": "b"}\n'
    done = run("publish", topic, "--json-lines", stdin=lines, code=1)
    assert b"published 1 message " in done.stdout
    assert error_of(done)[0].startswith("line 3 of stdin: ")
    assert values(topic) == [b"a"]


def test_what_cannot_be_published(topic: str, tmp_path: Path) -> None:
    run("topic", "create", topic, "--message-bytes-max", "100")
    assert error_of(run("publish", topic, "--file", str(tmp_path / "none"), code=1)) == (
        f"{tmp_path}/none: No such file or directory",
        "system_error",
    )
    done = run("publish", topic, stdin=b"a\n" + b"x" * 200, code=1)
    assert error_of(done)[1] == "message_too_large"


def test_tail_follows_what_is_published(topic: str) -> None:
    run("topic", "create", topic)
    run("publish", topic, "zero", "one")
    with (
        started("tail", topic, "--last", "1", "-n", "3", "--values") as tail,
        started("publish", topic, stdin=subprocess.PIPE) as publish,
    ):
        assert line_of(tail) == b"one\n"
        assert publish.stdin is not None
        publish.stdin.write(b"two\n")
        publish.stdin.flush()
        assert line_of(tail) == b"two\n"  # while stdin is still open
        publish.stdin.write(b"three\n")
        publish.stdin.flush()
        assert ended(tail, 0) == b"three\n"
        assert ended(publish, 0).startswith(b"published 2 messages ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_tail_ends_cleanly_on_a_signal(topic: str, number: signal.Signals, code: int) -> None:
    run("topic", "create", topic)
    run("publish", topic, "a", "b")
    group = f"{topic}-group"
    with started("tail", topic, "--json", "--group", group) as tail:
        assert [json.loads(line_of(tail))["offset"] for _ in range(2)] == [0, 1]
        time.sleep(0.1)
        tail.send_signal(number)
        assert ended(tail, code) == b""
    (info,) = told("group", "describe", group)
    assert [(place["offset"], place["lag"]) for place in info["places"]] == [(2, 0)]
    assert info["members"] == {}


def test_tail_ends_when_nobody_reads_it_even_if_nothing_comes(topic: str) -> None:
    run("topic", "create", topic)
    run("publish", topic, "a")
    with started("tail", topic, "--from", "earliest") as tail:
        line_of(tail)
        assert tail.stdout is not None
        tail.stdout.close()
        assert tail.stderr is not None
        assert tail.stderr.read() == b""
        assert tail.wait(SOON_S) == 0


def test_an_interrupted_publish_keeps_what_it_took(topic: str) -> None:
    run("topic", "create", topic)
    with started("publish", topic, stdin=subprocess.PIPE) as publish:
        assert publish.stdin is not None
        publish.stdin.write(b"a\nb\nunfinis")
        publish.stdin.flush()
        assert run("tail", topic, "--from", "earliest", "-n", "2", "--values").stdout == b"a\nb\n"
        publish.send_signal(signal.SIGTERM)
        text = ended(publish, 143).decode()
    assert text == f"interrupted; published 2 messages to {topic}, synced: partition 0, offsets 0 to 1\n"
    assert values(topic) == [b"a", b"b"]


# Groups


def test_life_of_a_group(topic: str) -> None:
    group = f"{topic}-group"
    run("topic", "create", topic)
    run("publish", topic, *(str(number) for number in range(10)))
    read = ("tail", topic, "--values", "--group", group)
    assert run(*read, "-n", "4").stdout.split() == [b"0", b"1", b"2", b"3"]
    assert run(*read, "--wait", "2s").stdout.split() == [b"4", b"5", b"6", b"7", b"8", b"9"]
    run("publish", topic, "10")
    summary = {each["group"]: each for each in told("group", "list")}[group]
    assert (summary["members"], summary["lag"], summary["topics"]) == (0, 1, [topic])
    assert re.search(rf"^{group} +0 +1  {topic}$", text_of("group", "list"), re.MULTILINE)
    assert group in text_of("group", "list", "--names").splitlines()
    assert re.search(rf"^{topic} +0 +10 +11 +1  -$", text_of("group", "describe", group), re.MULTILINE)

    assert told("group", "seek", group, topic, "--to", "8")[0]["places"][0]["lag"] == 3
    assert run(*read, "--no-follow").stdout.split() == [b"8", b"9", b"10"]
    assert told("group", "seek", group, topic, "--to", "5m ago", "--partition", "0")[0]["places"][0]["offset"] == 0
    assert told("group", "seek", group, topic, "--to", "latest")[0]["places"][0]["offset"] == 11

    assert run("group", "delete", group, code=2).stderr.endswith(b"give --yes\n")
    assert text_of("group", "delete", group, "--yes") == f"deleted group {group}\n"
    text, code = error_of(run("group", "describe", group, code=1))
    assert code == "group_not_found"
    assert "headrace group list" in text


def test_a_group_at_work_is_shown_and_not_deleted(topic: str) -> None:
    group = f"{topic}-group"
    run("topic", "create", topic)
    run("publish", topic, "a")
    with started("tail", topic, "--group", group) as tail:
        line_of(tail)
        (info,) = told("group", "describe", group)
        assert info["places"][0]["member"] in info["members"]
        assert error_of(run("group", "delete", group, "--yes", code=1))[1] == "group_in_use"
        tail.send_signal(signal.SIGINT)
        ended(tail, 130)
    run("group", "delete", group, "--yes")


def test_tail_makes_no_topic(topic: str) -> None:
    for follow in ([], ["--no-follow"], ["--group", "g"]):
        assert error_of(run("tail", topic, *follow, code=1))[1] == "topic_not_found"
    assert told("topic", "list", topic) == []


# Where the broker is


def test_the_broker_of_the_default_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_URL", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with serving(tmp_path / "headrace"):
        run("topic", "create", "t")
        assert text_of("topic", "list", "--names") == "t\n"
        assert error_of(run("topic", "list", "--connect", f"headrace+unix://{tmp_path}/no", code=1))[1] == (
            "connection_failed"
        )


# The broker goes away


def test_tail_goes_on_when_the_broker_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    monkeypatch.setenv("HEADRACE_URL", f"headrace+unix://{data}/headrace.sock")
    with serving(data) as broker:
        run("topic", "create", "t")
        run("publish", "t", "a")
        with started("tail", "t", "--from", "earliest", "--values") as tail:
            assert line_of(tail) == b"a\n"
            broker.kill()
            broker.wait()
            with serving(data):
                run("publish", "t", "b")
                assert line_of(tail) == b"b\n"
            tail.send_signal(signal.SIGINT)
            tail.communicate(timeout=SOON_S)
            assert tail.returncode == 130


# Bench

MEASURED = ["publish_synced", "publish_written", "consume", "latency_p50_ms", "latency_p99_ms"]
MEASURED += ["latency_synced_p50_ms", "latency_synced_p99_ms", "publish_single_100_clients", "idle_rss_mb", "ready_s"]


def test_bench_measures_a_broker_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_run, "SAMPLES_MIN", 1)
    monkeypatch.setattr(brokers, "_SETTLE_S", 0)
    quickly = ("--seconds", "0.005", "--size", "50", "--batch", "10")
    assert main(["bench", str(tmp_path / "new"), *quickly, "--json"]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [*dict.fromkeys(row["name"].removeprefix("broker.") for row in rows)] == MEASURED
    assert all(row["median"] > 0 for row in rows)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_tenant_has_names_of_its_own(broker: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run("publish", topic, "ours")
    run("publish", topic, "theirs", "--tenant", "acme")
    assert text_of("tail", topic, "--from", "earliest", "--no-follow", "--values") == "ours\n"
    assert [info["topic"] for info in told("topic", "list", "--tenant", "acme")] == [topic]
    monkeypatch.setenv("HEADRACE_TENANT", "acme")
    assert text_of("tail", topic, "--from", "earliest", "--no-follow", "--values") == "theirs\n"
    assert f"{broker}?tenant=acme" in text_of("info")
    run("topic", "delete", topic, "--yes")
    monkeypatch.setenv("HEADRACE_TENANT", "a/b")
    text, code = error_of(run("info", code=1))
    assert code == "invalid_argument"
    assert "$HEADRACE_TENANT" in text
    monkeypatch.delenv("HEADRACE_TENANT")
    assert text_of("tail", topic, "--from", "earliest", "--no-follow", "--values") == "ours\n"
