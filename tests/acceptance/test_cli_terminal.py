"""The command line on a terminal: colours, --watch, the Python prompt, and Python itself."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.commands import Finished, run_command
from tests.known import ENVIRONMENT

import headrace
from headrace.cli.terminal import colours
from headrace.server import EmbeddedServer

COMMAND = [sys.executable, "-m", "headrace"]
SOON_S = 60.0
BOLD, RED = b"\x1b[1m", b"\x1b[31m"


def run(*arguments: str, code: int = 0) -> Finished:
    """Run a command to its end, which must have this exit code and no traceback."""
    done = run_command(arguments, timeout_s=SOON_S)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == code, done.stderr.decode()
    return done


class Terminal:
    """A command that has a terminal."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.shown = b""
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.execve(sys.executable, [*COMMAND, *arguments], environment)

    def type(self, text: bytes) -> None:
        os.write(self._fd, text)

    def interrupt(self) -> None:
        """Press Ctrl-C until it is seen: Python passes over one that comes before its prompt waits for a key."""
        deadline = time.monotonic() + SOON_S
        while b"KeyboardInterrupt" not in self.shown:
            assert time.monotonic() < deadline, self.shown
            self.type(b"\x03")
            self._read(1.0)

    def until(self, reached: Callable[[bytes], bool]) -> bytes:
        """Read until something is shown."""
        deadline = time.monotonic() + SOON_S
        while not reached(self.shown):
            assert time.monotonic() < deadline, self.shown
            if not self._read(0.1):
                assert reached(self.shown), self.shown
        return self.shown

    def end(self, *, control_d: bool = False) -> int:
        """Read until it ends; returns its exit code.

        With `control_d`, types Ctrl-D each second: one that arrives before readline has set up the terminal is lost.
        """
        deadline = time.monotonic() + SOON_S
        while self._read(1.0):
            assert time.monotonic() < deadline, self.shown
            if control_d:
                self.type(b"\x04")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self._fd)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return True
        try:
            more = os.read(self._fd, 1 << 16)
        except OSError:  # so Linux says that nobody has the other end
            return False
        self.shown += more
        return bool(more)


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """A command on a terminal, which is ended with the block."""
    plain = {name: text for name, text in ENVIRONMENT.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    opened = Terminal(list(arguments), {**plain, "TERM": "xterm", "LINES": "20", "COLUMNS": "100", **environment})
    watchdog = threading.Timer(SOON_S * 2, os.kill, (opened.pid, signal.SIGKILL))
    watchdog.start()
    try:
        yield opened
    finally:
        watchdog.cancel()
        opened.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a broker with a topic."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = EmbeddedServer(":memory:", host="127.0.0.1", port=port)
    with headrace.connect(f"headrace://127.0.0.1:{port}") as bus:
        bus.create_topic("orders")
    yield f"headrace://127.0.0.1:{port}"
    server.close()


# Colours


def test_colours_on_a_terminal_and_nowhere_else(url: str) -> None:
    with terminal("topic", "list", "--connect", url) as shown:
        assert shown.end() == 0
        assert BOLD + b"topic" in shown.shown
    with terminal("topic", "describe", "nope", "--connect", url) as shown:
        assert shown.end() == 1
        assert RED + b"headrace:" in shown.shown
    with terminal("topic", "nope") as shown:
        assert shown.end() == 2
        assert RED + b"error:" in shown.shown
    assert b"\x1b" not in run("topic", "list", "--connect", url).stdout


@pytest.mark.parametrize(
    ("words", "environment"), [(["--no-color"], {}), ([], {"NO_COLOR": "1"}), ([], {"TERM": "dumb"})]
)
def test_colours_can_be_turned_off(url: str, words: list[str], environment: dict[str, str]) -> None:
    for arguments in (["topic", "list", *words, "--connect", url], ["topic", "nope", *words]):
        with terminal(*arguments, **environment) as shown:
            shown.end()
            assert b"\x1b" not in shown.shown


def test_which_wish_for_colours_counts() -> None:
    assert colours.wanted({"FORCE_COLOR": "1", "TERM": "dumb"}, None)
    assert not colours.wanted({"FORCE_COLOR": "1", "NO_COLOR": "1"}, None)
    assert not colours.wanted({"FORCE_COLOR": "", "NO_COLOR": ""}, None)


# --watch


def test_watch_draws_over_what_it_drew(url: str) -> None:
    with terminal("topic", "list", "--watch", "50ms", "--connect", url) as shown:
        shown.until(lambda seen: seen.count(b"orders") >= 3)
        with headrace.connect(url) as bus:
            bus.create_topic("later", exist_ok=True)
        shown.until(lambda seen: b"later" in seen)
        shown.type(b"\x03")
        assert shown.end() == 128 + signal.SIGINT
        assert shown.shown.count(b"\x1b[3F") >= 2  # back over the line on top, the heading and a topic
        assert b"Traceback" not in shown.shown
        assert shown.shown.endswith(b"\x1b[?7h\r\x1b[K")  # long lines are wrapped again
        with headrace.connect(url) as bus:
            bus.delete_topic("later")


def test_watch_shows_no_more_than_fits(url: str) -> None:
    with terminal("topic", "describe", "orders", "--watch", "50ms", "--connect", url, LINES="6") as shown:
        shown.until(lambda seen: b"more lines" in seen)
        shown.type(b"\x03")
        shown.end()


def test_watch_into_a_pipe_prints_again(url: str) -> None:
    for words in (["topic", "list"], ["topic", "describe", "orders"], ["group", "list"], ["info"]):
        command = [*COMMAND, *words, "--watch", "50ms", "--json", "--connect", url]
        if words == ["group", "list"]:
            with headrace.connect(url) as bus:
                bus.commit("billing", {("orders", 0): 0})
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
            watchdog = threading.Timer(SOON_S, process.kill)
            watchdog.start()
            assert process.stdout is not None
            first, second = (json.loads(process.stdout.readline()) for _ in range(2))
            assert first.keys() == second.keys()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
            watchdog.cancel()
            assert (process.returncode, errors) == (130, b"")


def test_watch_goes_on_when_the_broker_is_back(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = EmbeddedServer(":memory:", unix_socket=str(path))
    command = [*COMMAND, "info", "--watch", "50ms", "--connect", f"headrace+unix://{path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        watchdog = threading.Timer(SOON_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        _read_until(process.stdout.readline, b"broker ")
        server.close()
        _read_until(process.stdout.readline, b"[connection_failed]")
        server = EmbeddedServer(":memory:", unix_socket=str(path))
        _read_until(process.stdout.readline, b"broker ")
        process.terminate()
        watchdog.cancel()
    server.close()


def _read_until(readline: Callable[[], bytes], wanted: bytes) -> None:
    while wanted not in (line := readline()):
        assert line, "it has ended"


def test_a_value_after_watch_is_its_interval(url: str) -> None:
    said = run("topic", "describe", "--watch", "orders", "--connect", url, code=2).stderr
    assert b"put it last" in said


# Python


def test_python_runs_with_headrace_and_keeps_exit_codes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, headrace; print(sys.argv[1:], headrace.__version__); sys.exit(7)")
    done = run("python", str(script), "--json", "-x", "--no-color", "--", "--help", code=7)
    assert done.stdout.decode() == f"['--json', '-x', '--no-color', '--', '--help'] {headrace.__version__}\n"
    assert run("python", "-c", "import sys; print(sys.executable)").stdout.decode().strip() == sys.executable
    assert b"usage:" in run("python", "--help").stdout


@pytest.mark.parametrize("connected", [True, False])
def test_the_shell_has_a_bus_if_a_broker_answers(url: str, tmp_path: Path, connected: bool) -> None:
    environment = {**ENVIRONMENT, "HEADRACE_URL": url if connected else f"headrace+unix://{tmp_path}/none"}
    asked = "print(headrace.__name__, 'bus' in globals())\nexit(5)\n"
    done = subprocess.run(
        [*COMMAND, "shell"], input=asked, env=environment, capture_output=True, text=True, timeout=SOON_S, check=False
    )
    assert done.returncode == 5
    assert f"headrace {connected}" in done.stdout
    assert (f"`bus` is connected to {url}" in done.stderr) == connected
    assert ("No `bus`" in done.stderr) != connected


def test_the_shell_on_a_terminal_survives_ctrl_c(url: str) -> None:
    with terminal("shell", HEADRACE_URL=url) as shown:
        shown.until(lambda seen: seen.rstrip().endswith(b">>>"))
        shown.interrupt()
        shown.until(lambda seen: b"KeyboardInterrupt" in seen)
        shown.type(b"bus.topics()[0].topic\n")
        shown.until(lambda seen: b"'orders'" in seen)
        assert shown.end(control_d=True) == 0


def test_a_broker_that_was_named_must_answer_the_shell(tmp_path: Path) -> None:
    assert b"cannot reach" in run("shell", "--connect", f"headrace+unix://{tmp_path}/none", code=1).stderr


# ping and info


def test_ping_tells_how_long_answers_take(url: str) -> None:
    done = run("ping", "--count", "3", "--interval", "0", "--json", "--connect", url)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["number"] for answer in answers] == [1, 2, 3]
    assert all(answer["ms"] > 0 for answer in answers)
    text = run("ping", "-c", "2", "-i", "0", "--connect", url).stdout.decode()
    assert "2 answers: min " in text
    assert run("ping", "--connect", "headrace://127.0.0.1:1", code=1).stdout == b""


def test_ping_waits_until_there_is_a_broker(tmp_path: Path) -> None:
    path = tmp_path / "s"
    command = [*COMMAND, "ping", "--wait", "50s", "--count", "1", "--json", "--connect", f"headrace+unix://{path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        server = EmbeddedServer(":memory:", unix_socket=str(path))
        out, _ = process.communicate(timeout=SOON_S)
    server.close()
    assert process.returncode == 0
    assert json.loads(out)["number"] == 1


def test_info_tells_about_the_broker(url: str) -> None:
    told = json.loads(run("info", "--json", "--connect", url).stdout)
    assert told["address"] == url
    assert told["listening"] == [url]
    assert (told["data"], told["topics"], told["pid"]) == (":memory:", 1, os.getpid())
    assert told["version"] == headrace.__version__
    assert told["memory_bytes"] > 1 << 20
    assert told["uptime_seconds"] > 0
    assert told["limits"]["message_bytes_max"] == 16 << 20
    assert told["limits"]["topics_max"] == 10_000
    text = run("info", "--connect", url).stdout.decode()
    for word in (headrace.__version__, url, ":memory:", "uptime", "memory", "connections_max"):
        assert word in text
