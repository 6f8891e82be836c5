"""The commands of leased subscriptions, used as a person or a script uses them.

Most run in the process of the test, which is ten times as fast; where it matters, they are processes of their own.
"""

# Fixtures that come from another file are used by their names only.
# ruff: noqa: F401, F811

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec
import pytest
from tests.acceptance.test_cli_broker import (
    COMMAND,
    SOON_S,
    Finished,
    broker,
    error_of,
    serving,
    started,
    topic,
)
from tests.acceptance.test_cli_broker import run as run_alone
from tests.acceptance.test_completion import bash as offered

import headrace
from headrace.cli.command_list import whole_parser
from headrace.cli.command_tree import command_tree
from headrace.cli.main import main
from headrace.cli.setting_options import field_explanations
from headrace.model.subscription import SubscriptionSettings

HOUR_US = 3_600_000_000
LATER = "2040-06-01T12:00:00Z"
LATER_US = 2_222_164_800_000_000


@pytest.fixture
def bus(broker: str) -> Iterator[headrace.Bus]:
    """What a program at work on the same broker has."""
    with headrace.connect(broker, name="worker") as bus:
        yield bus


def run(*arguments: str, code: int = 0) -> Finished:
    """Run a command, which must end with this exit code."""
    with TemporaryFile("w+", encoding="utf-8") as out, TemporaryFile("w+", encoding="utf-8") as errors:
        with redirect_stdout(out), redirect_stderr(errors):
            exit_code = main(arguments)
        said = [os.pread(file.fileno(), 1 << 24, 0) for file in (out, errors)]
    assert exit_code == code, said[1].decode()
    return Finished(arguments, exit_code, *said)


def text_of(*arguments: str) -> str:
    """What a command prints."""
    return run(*arguments).stdout.decode()


def told(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """What a command prints with --json."""
    return [json.loads(line) for line in run(*arguments, "--json", code=code).stdout.splitlines()]


def values(messages: list[dict[str, Any]]) -> list[str]:
    return [message["value"] for message in messages]


def eventually(find: Any, *wanted: Any) -> Any:
    """What is found at last, when it is what is wanted, or there is any."""
    deadline = time.monotonic() + SOON_S
    while True:
        found = find()
        if found in wanted if wanted else found:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


# Help and wrong usage

COMMANDS = {
    "queue": ["list", "create", "alter", "delete", "stats", "peek", "drain", "redrive", "pause", "resume"],
    "timeline": ["list", "show", "add", "move", "cancel", "forecast"],
    "cron": ["add", "list", "show", "pause", "resume", "run", "next", "remove"],
}
ALL = [f"{first} {second}" for first, others in COMMANDS.items() for second in others]


@pytest.mark.parametrize("command", ALL)
def test_every_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"  headrace {command}" in text.partition("example")[2]
    for option in ("--json", "--connect"):
        assert option in text


def test_every_setting_of_a_subscription_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    explained = field_explanations(SubscriptionSettings)
    for command in ("create", "alter"):
        main(["queue", command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        for field in msgspec.structs.fields(SubscriptionSettings):
            assert f"--{field.name.replace('_', '-')}" in text
            assert explained[field.name].rstrip(".") in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["queue"], "usage: headrace queue"),
        (["queue", "create"], "TOPIC"),
        (["queue", "create", "t", "--discipline", "random"], "invalid choice: 'random'"),
        (["queue", "create", "t", "--lease-seconds", "soon"], "'soon' is not a time span"),
        (["queue", "alter", "t"], "at least one setting"),
        (["queue", "peek", "t", "--status", "lost"], "invalid choice: 'lost'"),
        (["queue", "peek", "t", "--to", "someday"], "'someday' is not a time; give one like"),
        (["queue", "peek", "t", "--header", "x"], "'x' is not NAME=VALUE"),
        (["queue", "drain", "t", "-0"], "--values"),
        (["queue", "drain", "t", "--values", "--quiet"], "not both"),
        (["queue", "drain", "t", "--max", "-1"], "--max"),
        (["queue", "stats", "t", "s", "u"], "unrecognized arguments: u"),
        (["timeline", "add", "t", "v"], "one of the arguments --at --in is required"),
        (["timeline", "add", "t", "v", "--at", "now", "--in", "1h"], "not allowed with"),
        (["timeline", "add", "t", "v", "--in", "0"], "'0' is not a time span"),
        (["timeline", "add", "t", "v", "--at", "tomorrow at nine"], "'tomorrow at nine' is not a time"),
        (["timeline", "show", "t/1"], "'t/1' is no message; write topic/partition/offset"),
        (["timeline", "move", "t/0/x", "--in", "1h"], "'t/0/x' is no message"),
        (["timeline", "cancel"], "ID"),
        (["timeline", "forecast", "t", "--buckets", "0"], "'0' is not a number above 0"),
        (["cron", "add", "n", "t"], "WHEN"),
        (["cron", "add", "n", "t", "@daily", "--missed", "maybe"], "invalid choice: 'maybe'"),
        (["cron", "next"], "give a NAME or --when"),
        (["cron", "next", "n", "--when", "@daily"], "give a NAME or --when"),
        (["cron", "next", "n", "--zone", "UTC"], "--zone needs --when"),
    ],
)
def test_wrong_usage_is_explained_and_ends_with_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("queue s|", ["stats"]),
        ("queue stats |", ["alpha", "beta"]),
        ("queue stats alpha b|", ["beta"]),
        ("queue peek alpha --status |", ["waiting", "ready", "leased", "dead"]),
        ("queue create alpha --dead-letter-topic a|", ["alpha"]),
        ("timeline list alpha --subscription |", ["alpha", "beta"]),
        ("timeline show |", []),
        ("cron pause b|", ["beta"]),
        ("cron add |", []),
        ("cron add alpha |", ["alpha", "beta"]),
        ("cron list --topic a|", ["alpha"]),
    ],
)
def test_what_a_shell_offers(line: str, offers: list[str]) -> None:
    assert offered(command_tree(whole_parser()), "headrace", *line.rstrip("|").split(" ")) == offers


def test_what_is_not_there_is_told(topic: str) -> None:
    for arguments in (["create"], ["stats"], ["peek"], ["drain"], ["redrive"], ["pause"], ["delete", "--yes"]):
        assert error_of(run("queue", arguments[0], topic, *arguments[1:], code=1))[1] == "topic_not_found"
    run("topic", "create", topic)
    for arguments in (["stats"], ["drain", "mail"], ["alter", "--paused"]):
        text, code = error_of(run("queue", arguments[0], topic, *arguments[1:], code=1))
        assert code == "subscription_not_found"
        assert "headrace queue create" in text
    assert told("queue", "list", topic) == []
    assert told("queue", "peek", topic) == []
    assert error_of(run("timeline", "show", f"{topic}/0/0", code=1))[1] == "message_gone"
    for command in ("show", "pause", "run", "next", "remove"):
        text, code = error_of(run("cron", command, "nobody", code=1))
        assert code == "schedule_not_found"
        assert "headrace cron list" in text


# Queues


def test_life_of_a_subscription(topic: str) -> None:
    run("topic", "create", topic)
    run("publish", topic, "a", "b")
    (made,) = told("queue", "create", topic, "mail", "--discipline", "lifo", "--lease-seconds", "5m")
    assert (made["topic"], made["subscription"], made["ready"]) == (topic, "mail", 2)
    assert (made["settings"]["discipline"], made["settings"]["lease_seconds"]) == ("lifo", 300)
    text, code = error_of(run("queue", "create", topic, "mail", code=1))
    assert code == "subscription_exists"
    assert "--exist-ok" in text
    run("queue", "create", topic, "mail", "--exist-ok")
    assert text_of("queue", "create", topic, "--start", "latest") == (
        f"subscription default of {topic}: fifo, 0 messages\n"
    )
    assert text_of(
        "queue", "alter", topic, "mail", "--retry", "linear", "--retry-seconds", "0", "--ordered-by-key"
    ) == (f"subscription mail of {topic}: retry linear, retry_seconds 0s, ordered_by_key yes\n")
    limits = ["--messages-max", "10", "--bytes-max", "1MiB", "--overflow", "drop_oldest", "--rejected", "drop"]
    use = ["--single-active-consumer", "--delete-unused-seconds", "1h"]
    assert text_of("queue", "alter", topic, "mail", *limits, *use) == (
        f"subscription mail of {topic}: messages_max 10, bytes_max 1MiB, overflow drop_oldest, rejected drop, "
        "single_active_consumer yes, delete_unused_seconds 1h\n"
    )
    run("queue", "alter", topic, "mail", "--messages-max", "none", "--bytes-max", "none", "--no-single-active-consumer")
    assert error_of(run("queue", "alter", topic, "mail", "--retry-jitter", "7", code=1))[1] == "invalid_argument"
    assert text_of("queue", "pause", topic, "mail") == f"subscription mail of {topic} is paused\n"
    assert text_of("queue", "drain", topic, "mail") == ""
    lines = text_of("queue", "list", topic).splitlines()
    assert re.fullmatch(rf"{topic} +default +fifo +0 +0 +0 +0", lines[1])
    assert re.fullmatch(rf"{topic} +mail +lifo, paused +0 +2 +0 +0", lines[2])
    assert [each["subscription"] for each in told("queue", "list", topic)] == ["default", "mail"]
    assert "mail" in text_of("queue", "list", "--names").splitlines()
    assert text_of("queue", "resume", topic, "mail") == f"subscription mail of {topic} delivers messages\n"
    assert run("queue", "drain", topic, "mail", "--values").stdout == b"b\na\n"

    assert run("queue", "reset", topic, "mail", code=2).stderr.endswith(b"give --yes\n")
    for start, ready in (((), "0 messages"), (("--start", "earliest"), "2 messages")):
        assert text_of("queue", "reset", topic, "mail", *start, "--yes") == (
            f"subscription mail of {topic} was reset: {ready} to deliver\n"
        )
    assert run("queue", "delete", topic, "mail", code=2).stderr.endswith(b"give --yes\n")
    assert text_of("queue", "delete", topic, "mail", "--yes") == f"deleted subscription mail of {topic}\n"
    assert [each["subscription"] for each in told("queue", "list", topic)] == ["default"]


def test_peek_shows_and_leases_nothing(topic: str, bus: headrace.Bus) -> None:
    run("publish", topic, "one", "--key", "k", "--header", "lang=en")
    run("publish", topic, "two", "--header", "headrace-owner=shop", "--header", "lang=de")
    run("publish", topic, "late", "--due", LATER)
    run("queue", "create", topic)
    assert values(told("queue", "peek", topic)) == ["one", "two", "late"]
    assert values(told("queue", "peek", topic, "-n", "1")) == ["one"]
    assert values(told("queue", "peek", topic, "--status", "ready", "--header", "lang=de")) == ["two"]
    assert values(told("queue", "peek", topic, "--owner", "shop")) == ["two"]
    assert values(told("queue", "peek", topic, "--key", "k")) == ["one"]
    assert values(told("queue", "peek", topic, "--from", "in 1h")) == ["late"]
    assert told("queue", "peek", topic, "--status", "dead") == []
    assert (
        text_of("queue", "peek", topic, "--status", "waiting") == "0:2\twaiting\t2040-06-01T12:00:00.000000Z\t-\tlate\n"
    )
    (stats,) = told("queue", "stats", topic)
    assert [stats[status] for status in ("waiting", "ready", "leased", "dead", "delivered")] == [1, 2, 0, 0, 0]
    assert stats["next_ready_us"] == LATER_US

    (job,) = bus.queue(topic).lease(max=1)
    (leased,) = told("queue", "peek", topic, "--status", "leased")
    assert (leased["value"], leased["holder"], leased["deliveries"]) == ("one", "worker", 1)
    assert leased["until_us"] == job.until
    assert "\tleased by worker\t" in text_of("queue", "peek", topic, "--status", "leased")
    bus.queue(topic).release(job, delay=0, reason="Traceback\n  ...\nValueError: \x1b[31mno")
    text = text_of("queue", "peek", topic, "--key", "k")
    assert text.split("\t")[1] == "ready, delivered once: ValueError: \\x1b[31mno"


def test_stats_for_people(topic: str, bus: headrace.Bus) -> None:
    run("publish", topic, "a", "b", "c")
    run("publish", topic, "soon", "--due", "in 2h")
    run("publish", topic, "now", "--due", "now")
    queue = bus.queue(topic)
    first, second, *_ = queue.lease(max=4)
    queue.ack(first)
    queue.reject(second, reason="no good")
    for job in queue.jobs(timeout=1):
        assert job.value == b"now"
    text = text_of("queue", "stats", topic)
    assert re.search(r"^waiting +1  the next in 1h 59m, at 20", text, re.MULTILINE)
    assert re.search(r"^ready +0$", text, re.MULTILINE)
    assert re.search(r"^leased +[12]$", text, re.MULTILINE)
    assert re.search(rf"^dead +1  in {topic}\.dead$", text, re.MULTILINE)
    assert re.search(r"^acked +\d$", text, re.MULTILINE)
    (stats,) = told("queue", "stats", topic)
    assert stats["timing"]["early"] == 0
    assert sum(stats["timing"]["counts"]) in (0, 1)
    assert ("with a due time:" in text) is bool(sum(stats["timing"]["counts"]))


def test_drain_of_a_topic_that_was_never_leased_has_all_its_messages(topic: str) -> None:
    run("topic", "create", topic)
    run("publish", topic, "a", "b")
    assert run("queue", "drain", topic, "--values").stdout == b"a\nb\n"
    assert told("queue", "drain", topic, "--quiet") == [{"topic": topic, "subscription": "default", "drained": 0}]
    assert told("queue", "stats", topic)[0]["acked"] == 2


def test_drain_prints_and_acknowledges_as_tail_does(topic: str) -> None:
    run("topic", "create", topic, "--partitions", "2")
    lines = [f"k{number % 5}:{number}" for number in range(2500)]
    run_alone("publish", topic, "--key-separator", ":", stdin="\n".join(lines).encode())
    run("queue", "create", topic)
    first = told("queue", "drain", topic, "--max", "3")
    assert [set(message) for message in first] == [{"topic", "partition", "offset", "timestamp", "key", "value"}] * 3
    assert re.fullmatch(r"[01]:\d+\t20[\d-]+T[\d:.]+Z\tk\d\t\d+\n", text_of("queue", "drain", topic, "--max", "1"))
    rest = run_alone("queue", "drain", topic, "--values", "-0").stdout.split(b"\0")[:-1]
    assert len(rest) == 2496
    run("publish", topic, "one", "more")
    assert text_of("queue", "drain", topic, "--quiet") == "drained 2 messages\n"
    assert told("queue", "drain", topic, "--quiet") == [{"topic": topic, "subscription": "default", "drained": 0}]
    (stats,) = told("queue", "stats", topic)
    assert (stats["ready"], stats["leased"], stats["acked"]) == (0, 0, 2502)


def test_what_drain_could_not_print_is_not_acknowledged(topic: str) -> None:
    run("topic", "create", topic)
    run("publish", topic, *(str(number) for number in range(10)))
    run("queue", "create", topic)
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, "queue", "drain", topic], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    (stats,) = told("queue", "stats", topic)
    assert (stats["ready"] + stats["waiting"], stats["leased"], stats["acked"]) == (10, 0, 0)


def test_an_interrupted_drain_acknowledges_what_it_printed(topic: str, bus: headrace.Bus) -> None:
    bus.publish_many(topic, [b"%0200d" % number for number in range(5000)])
    run("queue", "create", topic)
    with started("queue", "drain", topic, "--values") as drain:
        assert drain.stdout is not None
        lines = [drain.stdout.readline()]  # the rest waits for a reader
        drain.send_signal(signal.SIGTERM)
        lines += drain.stdout.readlines()
        assert drain.wait(SOON_S) == 143
    (stats,) = told("queue", "stats", topic)
    assert 0 < len(lines) < 5000
    assert (stats["acked"], stats["ready"], stats["leased"]) == (len(lines), 5000 - len(lines), 0)


def test_a_drained_topic_can_be_copied(topic: str) -> None:
    run("publish", topic, "a", "b", "--key", "k", "--header", "h=1")
    run("queue", "create", topic)
    lines = run("queue", "drain", topic, "--json").stdout
    run_alone("publish", f"{topic}-copy", "--json-lines", stdin=lines)
    assert [json.loads(line) | {"topic": f"{topic}-copy"} for line in lines.splitlines()] == told(
        "tail", f"{topic}-copy", "--no-follow"
    )


def test_dead_messages_are_put_back(topic: str, bus: headrace.Bus) -> None:
    for number in range(4):
        run("publish", topic, f"bad {number}", "--key", f"k{number % 2}")
    queue = bus.queue(topic)
    for job in queue.lease(max=4):
        queue.reject(job, reason=f"cannot do {job.value.decode()}")
    dead = told("queue", "peek", topic, "--status", "dead", "--key", "k1")
    assert values(dead) == ["bad 1", "bad 3"]
    assert dead[0]["reason"] == "cannot do bad 1"
    assert "\tdead, delivered once: cannot do bad 1\t" in text_of(
        "queue", "peek", topic, "--status", "dead", "-k", "k1"
    )
    assert text_of("queue", "redrive", topic, "--key", "k1", "--max", "1") == "put back 1 dead message\n"
    assert told("queue", "redrive", topic, "--to", "1h ago")[0]["redriven"] == 0
    assert told("queue", "redrive", topic) == [{"topic": topic, "subscription": "default", "redriven": 3}]
    (stats,) = told("queue", "stats", topic)
    assert (stats["dead"], stats["ready"]) == (0, 4)
    assert sorted(run("queue", "drain", topic, "--values").stdout.splitlines()) == [
        f"bad {number}".encode() for number in range(4)
    ]


# Timelines


def test_life_of_a_message_on_the_timeline(topic: str) -> None:
    run("topic", "create", topic)
    (added,) = told(
        "timeline", "add", topic, "call", "--at", LATER, "--key", "ann", "--header", "h=1", "--priority", "3"
    )
    name = added["id"]
    assert added == {"id": f"{topic}/0/0@{name.partition('@')[2]}", "version": 1, "due_us": LATER_US}
    assert text_of("timeline", "move", f"{topic}/0/0", "--at", "2040-06-01T13:00", "--version", "1") == (
        f"{topic}/0/0 comes due 2040-06-01T13:00:00.000000Z, version 2\n"
    )
    text, code = error_of(run("timeline", "move", f"{topic}/0/0", "--in", "1h", "--version", "1", code=1))
    assert code == "stale_version"
    assert "headrace timeline show" in text
    (shown,) = told("timeline", "show", f"{topic}/0/0")
    assert (shown["id"], shown["status"], shown["version"]) == (name, "waiting", 2)
    assert (shown["ready_us"], shown["key"], shown["priority"]) == (LATER_US + HOUR_US, "ann", 3)
    lines = dict(line.split(maxsplit=1) for line in text_of("timeline", "show", f"{topic}/0/0").splitlines())
    assert (lines["ready"], lines["value"], lines["header"]) == ("2040-06-01T13:00:00.000000Z", "call", "h=1")

    before_us = time.time_ns() // 1000
    (moved,) = told("timeline", "move", f"{topic}/0/0", "--in", "1h")
    assert HOUR_US <= moved["due_us"] - before_us < HOUR_US + SOON_S * 1e6
    assert text_of("timeline", "cancel", name) == f"cancelled {name}\n"
    assert text_of("timeline", "cancel", f"{topic}/0/0") == f"cancelled {topic}/0/0\n"  # it is
    for command in (["show"], ["move", "--in", "1h"]):
        assert error_of(run("timeline", command[0], f"{topic}/0/0", *command[1:], code=1))[1] == "message_gone"


def test_what_comes_due_is_listed_by_time(topic: str) -> None:
    run("topic", "create", topic)
    run("queue", "create", topic)
    for hour, key in ((14, "a"), (12, "b"), (13, "a")):
        run("timeline", "add", topic, f"at {hour}", "--at", f"2040-06-01T{hour}:00", "--key", key, "--owner", f"o{key}")
    run("publish", topic, "at once")
    assert values(told("timeline", "list", topic)) == ["at 12", "at 13", "at 14"]
    assert values(told("timeline", "list", topic, "--key", "a")) == ["at 13", "at 14"]
    assert values(told("timeline", "list", topic, "--owner", "ob")) == ["at 12"]
    between = ["--from", "2040-06-01T12:30", "--to", "2040-06-01T14:00"]
    assert values(told("timeline", "list", topic, *between)) == ["at 13"]
    assert values(told("timeline", "list", topic, "-n", "2")) == ["at 12", "at 13"]
    listed = text_of("timeline", "list", topic, "-n", "1").split("\t")
    assert [*listed[:1], *listed[2:]] == ["2040-06-01T12:00:00.000000Z", "b", "at 12", "headrace-owner=ob\n"]
    assert listed[1].startswith(f"{topic}/0/1@")


def test_a_forecast(topic: str, bus: headrace.Bus) -> None:
    run("topic", "create", topic)
    run("queue", "create", topic)
    for hours in (0, 1, 1, 1, 1, 3, 3, 9):
        bus.publish(topic, b"x", due=LATER_US + hours * HOUR_US)
    ask = ("timeline", "forecast", topic, "--from", "2040-06-01T13:00", "--bucket", "1h", "--buckets", "3")
    assert told(*ask) == [
        {
            "topic": topic,
            "subscription": "default",
            "from_us": LATER_US + HOUR_US,
            "bucket_us": HOUR_US,
            "before": 1,
            "counts": [4, 0, 2],
            "after": 1,
        }
    ]
    done = subprocess.run([*COMMAND, *ask], env={**os.environ, "COLUMNS": "32"}, capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == [
        "before             1  ██▌",
        "2040-06-01T13:00Z  4  ██████████",
        "2040-06-01T14:00Z  0",
        "2040-06-01T15:00Z  2  █████",
        "later              1  ██▌",
    ]
    (hourly,) = told("timeline", "forecast", topic)
    assert (hourly["from_us"] % HOUR_US, len(hourly["counts"]), hourly["after"]) == (0, 24, 8)


def test_what_somebody_else_has_or_owns_is_not_changed(topic: str, bus: headrace.Bus) -> None:
    run("topic", "create", topic)
    run("publish", topic, "in hand")
    (job,) = bus.queue(topic).lease(max=1)
    text, code = error_of(run("timeline", "cancel", f"{topic}/0/0", code=1))
    assert code == "message_leased"
    run("timeline", "add", topic, "mine", "--in", "2h", "--owner", "billing")
    text, code = error_of(run("timeline", "move", f"{topic}/0/1", "--in", "3h", code=1))
    assert code == "not_owner"
    assert "--owner" in text
    run("timeline", "add", topic, "free", "--in", "2h")
    places = [f"{topic}/0/{offset}" for offset in (0, 1, 2)]
    assert told("timeline", "cancel", *places, code=1) == [
        {"id": places[0], "cancelled": False, "code": "message_leased"},
        {"id": places[1], "cancelled": False, "code": "not_owner"},
        {"id": places[2], "cancelled": True},
    ]
    done = run("timeline", "cancel", *places[:2], "--owner", "billing", code=1)
    assert done.stdout.decode() == f"cancelled {places[1]}\n"
    assert f"headrace: {places[0]}: " in done.stderr.decode()
    bus.queue(topic).ack(job)


# Schedules


@pytest.fixture
def cron(topic: str) -> Iterator[str]:
    """A name for a schedule, which is removed in the end."""
    yield f"{topic}-cron"
    main(["cron", "remove", f"{topic}-cron"])


def test_life_of_a_schedule(topic: str, cron: str) -> None:
    run("topic", "create", topic)
    ask = ("cron", "add", cron, topic, "0 9 * * mon-fri", "report", "--zone", "Europe/Berlin")
    (made,) = told(*ask, "--missed", "skip", "--overlap", "skip", "--key", "k", "--header", "h=1", "--runs-max", "99")
    assert (made["name"], made["when"], made["zone"]) == (cron, "0 9 * * mon-fri", "Europe/Berlin")
    assert (made["missed"], made["overlap"], made["runs_max"]) == ("skip", "skip", 99)
    assert (made["key"], made["value"], made["headers"], made["runs"]) == ("k", "report", {"h": "1"}, 0)
    assert made["next_us"] > time.time_ns() // 1000
    text, code = error_of(run(*ask, code=1))
    assert code == "schedule_exists"
    assert "--replace" in text
    assert text_of(*ask, "--replace").startswith(f"{cron}: the next run is at 20")
    assert [each["name"] for each in told("cron", "list", "--topic", topic)] == [cron]
    assert re.search(rf"^{cron} +{topic} +0 9 \* \* mon-fri +Europe/Berlin +20.+Z +0$", text_of("cron", "list"), re.M)
    assert cron in text_of("cron", "list", "--names").splitlines()

    assert text_of("cron", "run", cron).startswith(f"published to {topic}; the next run is at 20")
    (message,) = told("tail", topic, "--no-follow")
    assert (message["value"], message["headers"]["headrace-cron"]) == ("report", cron)
    assert text_of("cron", "pause", cron) == f"{cron}: paused\n"
    assert told("cron", "show", cron)[0]["paused"] is True
    assert re.search(r"^next run  paused$", text_of("cron", "show", cron), re.MULTILINE)
    assert told("cron", "resume", cron)[0]["paused"] is False
    assert text_of("cron", "remove", cron) == f"removed {cron}\n"
    assert error_of(run("cron", "show", cron, code=1))[1] == "schedule_not_found"


def test_next_runs(topic: str, cron: str) -> None:
    run("topic", "create", topic)
    run("cron", "add", cron, topic, "30 2 * * *", "--zone", "Europe/Berlin", "--start", "2040-10-27T12:00Z")
    assert text_of("cron", "next", cron, "-n", "2") == (
        "2040-10-28T00:30:00.000000Z\t2040-10-28T02:30:00+02:00\n"
        "2040-10-29T01:30:00.000000Z\t2040-10-29T02:30:00+01:00\n"
    )
    (run_,) = told("cron", "next", "--when", "@yearly", "-n", "1")
    assert run_["local"].endswith("-01-01T00:00:00+00:00")
    (run_,) = told("cron", "next", "--when", "30 0 12 * * *", "-n", "1")
    assert run_["local"].endswith("T12:00:30+00:00")
    for wrong in (["--when", "61 * * * *"], ["--when", "@daily", "--zone", "Europe/Atlantis"]):
        assert error_of(run("cron", "next", *wrong, code=1))[1] == "invalid_argument"
    assert error_of(run("cron", "add", cron, topic, "every now and then", "--replace", code=1))[1] == "invalid_argument"


def test_a_schedule_runs(topic: str, cron: str) -> None:
    run("topic", "create", topic)
    run("cron", "add", cron, topic, "every 100ms", "tick", "--runs-max", "3")
    found = eventually(lambda: [info for info in told("cron", "list", "--topic", topic) if info["runs"] == 3])
    assert found[0]["next_us"] == 0
    assert text_of("cron", "next", cron) == ""
    assert run("tail", topic, "--no-follow", "--values").stdout == b"tick\ntick\ntick\n"


# What a restart of the broker leaves


def test_everything_is_there_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    monkeypatch.setenv("HEADRACE_URL", f"headrace+unix://{data}/headrace.sock")
    with serving(data) as first:
        run("topic", "create", "t")
        run("queue", "create", "t", "--discipline", "lifo")
        run("publish", "t", "done", "open")
        assert run("queue", "drain", "t", "--values", "--max", "1").stdout == b"open\n"
        run("timeline", "add", "t", "later", "--at", LATER)
        run("timeline", "move", "t/0/2", "--at", "2041-01-01")
        run("cron", "add", "daily", "t", "@daily", "--zone", "Asia/Tokyo")
        first.kill()
        first.wait()
    with serving(data):
        assert values(told("queue", "peek", "t")) == ["done", "later"]
        assert told("timeline", "show", "t/0/2")[0]["version"] == 2
        assert told("cron", "show", "daily")[0]["zone"] == "Asia/Tokyo"
