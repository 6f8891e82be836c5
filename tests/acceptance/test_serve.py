"""`headrace serve` as a process: how it starts, tells where it is, keeps others out, and ends."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.known import ENVIRONMENT
from tests.native_client import NativeClient

from headrace.model.batch import Columns, encode, parse
from headrace.model.errors import CorruptBatch, Draining, LimitExceeded
from headrace.model.reading import Fetch, StreamOpen
from headrace.model.requests import Commit, Info, PartitionOffset, Publish, TopicCreate
from headrace.server import EmbeddedServer
from headrace.wire.native import Kind, Ping

COMMAND = [sys.executable, "-m", "headrace", "serve"]
SOON_S = 120.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Where a server may keep its data."""
    return tmp_path / "data"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Nothing is configured."""
    clean = {name: text for name, text in ENVIRONMENT.items() if not name.startswith("HEADRACE_")}
    return {**clean, "XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path / "share")}


class Serving:
    """A server's process."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self._clients: list[NativeClient] = []
        assert process.stdout is not None
        self.ready: dict[str, Any] = json.loads(process.stdout.readline() or "{}")
        assert self.ready.get("ready"), (process.wait(SOON_S), process.stderr and process.stderr.read())

    def client(self, *, unix: bool = False) -> NativeClient:
        """A client that has said hello."""
        if unix:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self.ready["unix_socket"])
        else:
            sock = socket.create_connection(("127.0.0.1", self.ready["port"]))
        self._clients.append(NativeClient(sock))
        self._clients[-1].hello()
        return self._clients[-1]

    def hang_up(self) -> None:
        """Close all clients."""
        for client in self._clients:
            client.close()

    def end(self, number: int = signal.SIGTERM, code: int = 0) -> str:
        """End it with a signal; returns what it logged."""
        self.process.send_signal(number)
        return self.ended(code)

    def ended(self, code: int = 0) -> str:
        """Wait for its end."""
        out, log = self.process.communicate(timeout=SOON_S)
        assert (self.process.returncode, out) == (code, b""), log.decode()
        assert b"Traceback" not in log
        return log.decode()


@contextmanager
def serving(environment: dict[str, str], *arguments: str) -> Iterator[Serving]:
    """A server at work, which is ended with the block if it has not by itself."""
    pipe = subprocess.PIPE
    command = [*COMMAND, "--port", "0", "--json", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment) as process:
        watchdog = threading.Timer(SOON_S, process.kill)
        watchdog.start()
        try:
            server = Serving(process)
            yield server
            server.hang_up()
        finally:
            watchdog.cancel()
            process.kill()


def run(environment: dict[str, str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """Run to the end; returns what it printed and what it logged."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, timeout=SOON_S, env=environment, check=False)
    assert done.returncode == code, done.stderr.decode()
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


def batch(*values: bytes) -> bytes:
    return bytes(encode(Columns(values), time.time_ns() // 1000).data)


def values(client: NativeClient, topic: str) -> list[bytes | None]:
    _, body = client.ask_for_batches(Fetch(topic, 0, 0))
    found, position = [], 0
    while position < len(body):
        one = parse(memoryview(body), position)
        found += one.columns().values
        position += one.length
    return found


# Starting


def test_one_line_tells_that_it_is_ready_and_where(environment: dict[str, str], data: Path) -> None:
    pipe = subprocess.PIPE
    command = [*COMMAND, "--data", str(data), "--port", "0"]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        found = re.fullmatch(r"headrace: ready on 127\.0\.0\.1:(\d+) and (\S+), data in (\S+), process (\d+)\n", line)
        assert found, line
        assert (found[2], found[3], found[4]) == (f"{data}/headrace.sock", str(data), str(process.pid))
        with socket.create_connection(("127.0.0.1", int(found[1]))) as sock:
            assert NativeClient(sock).hello().server.startswith("headrace ")
        process.terminate()
        _, log = process.communicate(timeout=SOON_S)
        assert process.returncode == 0
    for line in log.decode().splitlines():
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (info|warning) headrace\.\w+ \S", line), line


def test_clients_come_through_tcp_and_through_a_unix_socket(environment: dict[str, str], data: Path) -> None:
    with serving(environment, "--data", str(data)) as server:
        with server.client() as near, server.client(unix=True) as far:
            near.ask(TopicCreate("orders"))
            assert near.ask(Publish("orders", 0), batch(b"one", b"two")).base_offset == 0
            assert values(far, "orders") == [b"one", b"two"]
            assert far.ask(Info()).connections == 2
        server.end()
    assert not (data / "headrace.sock").exists()


def test_messages_outlive_the_server(environment: dict[str, str], data: Path) -> None:
    for number in range(3):
        with serving(environment, "--data", str(data)) as server, server.client() as client:
            assert client.ask(Publish("orders", 0), batch(b"%d" % number)).base_offset == number
            assert values(client, "orders") == [b"%d" % one for one in range(number + 1)]
            server.end(signal.SIGTERM if number else signal.SIGKILL, 0 if number else -signal.SIGKILL)


def test_listens_only_where_it_is_told(environment: dict[str, str], data: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with serving(environment, "--data", str(data), "--host", "", "--unix-socket", path) as server:
        assert (server.ready["port"], server.ready["listening"], server.ready["unix_socket"]) == (None, [], path)
        with server.client(unix=True) as client:
            client.ask(Ping())
    with serving(environment, "--data", ":memory:", "--host", "::1") as server:
        assert server.ready["unix_socket"] is None
        assert server.ready["listening"] == [f"[::1]:{server.ready['port']}"]
        with socket.create_connection(("::1", server.ready["port"])) as sock:
            NativeClient(sock).hello()


def test_second_server_on_the_same_data_is_told_of_the_first(environment: dict[str, str], data: Path) -> None:
    with serving(environment, "--data", str(data)) as server:
        _, said = run(environment, "--data", str(data), "--port", "0", code=1)
        assert f"{data} is in use by process {server.process.pid}; end it first, " in said
        assert "[log_in_use]" in said
        server.client().ask(Ping())
        server.end()
    with serving(environment, "--data", str(data)):
        pass


def test_socket_of_a_dead_process_is_replaced_but_not_that_of_a_living_one(
    environment: dict[str, str], data: Path, tmp_path: Path
) -> None:
    with serving(environment, "--data", str(data)) as server:
        server.end(signal.SIGKILL, -signal.SIGKILL)
    assert (data / "headrace.sock").is_socket()
    with serving(environment, "--data", str(data)) as server:
        server.client(unix=True).ask(Ping())
        other = ("--data", str(tmp_path / "other"), "--port", "0", "--unix-socket", str(data / "headrace.sock"))
        assert "another process listens on" in run(environment, *other, code=1)[1]
        server.client(unix=True).ask(Ping())
    plain = tmp_path / "plain"
    plain.write_text("important")
    said = run(environment, "--data", str(data), "--port", "0", "--unix-socket", str(plain), code=1)[1]
    assert str(plain) in said
    assert plain.read_text() == "important"


def test_port_that_is_taken_is_an_error_that_leaves_nothing_locked(environment: dict[str, str], data: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = run(environment, "--data", str(data), "--port", port, code=1)[1]
        assert port in said
    assert not (data / "headrace.sock").exists()


def test_data_directory_that_cannot_be_is_an_error(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in run(environment, "--data", str(tmp_path / "file" / "below"), "--port", "0", code=1)[1]


def test_unix_socket_with_too_long_a_path(environment: dict[str, str], tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    with serving(environment, "--data", str(deep)) as server:
        assert server.ready["unix_socket"] is None
        assert "too long" in server.end()
    said = run(environment, "--data", str(deep), "--port", "0", "--unix-socket", f"{deep}/s", code=1)[1]
    assert "too long" in said


def test_more_connections_than_allowed_are_told_so(environment: dict[str, str], data: Path) -> None:
    with serving(environment, "--data", str(data), "--connections-max", "2") as server:
        first, second = server.client(), server.client()
        with pytest.raises(LimitExceeded, match="connections_max"):
            server.client()
        first.close()
        deadline = time.monotonic() + SOON_S
        while True:
            try:
                server.client().ask(Ping())
                break
            except LimitExceeded:
                assert time.monotonic() < deadline
        second.ask(Ping())


def test_silent_connections_are_ended_and_pinging_ones_are_not(environment: dict[str, str], data: Path) -> None:
    with serving(environment, "--data", str(data), "--heartbeat-ms", "200") as server:
        silent, alive = server.client(), server.client()
        assert alive.welcome.heartbeat_ms == 200
        dumb = socket.create_connection(("127.0.0.1", server.ready["port"]))
        dumb.settimeout(SOON_S)
        silent.socket.settimeout(0.05)
        ended = False
        deadline = time.monotonic() + SOON_S
        while not ended:
            assert time.monotonic() < deadline
            alive.ask(Ping())
            try:
                ended = not silent.socket.recv(1)
            except TimeoutError:
                continue
            except ConnectionResetError:
                ended = True
        with dumb, contextlib.suppress(ConnectionResetError):
            assert not dumb.recv(1), "one that never says hello is ended too"
        alive.ask(Ping())


# Ending


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_drains(environment: dict[str, str], data: Path, number: int) -> None:
    with serving(environment, "--data", str(data)) as server, server.client() as client:
        client.ask(Publish("orders", 0), batch(b"one"))
        server.process.send_signal(number)
        assert client.receive().kind == Kind.DRAIN
        with pytest.raises(Draining):
            client.ask(Publish("orders", 0), batch(b"two"))
        client.ask(Commit("billing", [PartitionOffset("orders", 0, 1)]))
        assert values(client, "orders") == [b"one"]
        client.close()
        assert "finished=True" in server.ended()


def test_drain_does_not_wait_for_idle_clients_for_long(environment: dict[str, str], data: Path) -> None:
    with serving(environment, "--data", str(data), "--drain-seconds", "600") as server, server.client() as client:
        client.ask(TopicCreate("orders"))
        client.ask(StreamOpen("orders", 0, 0, 1 << 20))
        server.end()
        assert client.receive().kind == Kind.DRAIN
        with pytest.raises(EOFError):
            client.receive()


def test_drain_does_not_wait_for_busy_clients_for_long(environment: dict[str, str], data: Path) -> None:
    with serving(environment, "--data", str(data), "--drain-seconds", "600") as server, server.client() as client:
        stop = threading.Event()

        def talk() -> None:
            while not stop.is_set():
                try:
                    client.ask(Commit("billing", [PartitionOffset("orders", 0, 0)]))
                except (EOFError, OSError):
                    return

        client.ask(TopicCreate("orders"))
        talking = threading.Thread(target=talk)
        talking.start()
        assert "finished=True" in server.end()
        stop.set()
        talking.join()


def test_second_signal_ends_the_waiting(environment: dict[str, str], data: Path) -> None:
    with serving(environment, "--data", str(data), "--drain-seconds", "600") as server, server.client() as client:
        client.ask(Publish("orders", 0), batch(bytes(1 << 20)))
        for _ in range(100):  # much more than sockets hold: the last of these are not answered as long as nobody reads
            client.send(Fetch("orders", 0, 0))
        other = server.client()
        server.process.send_signal(signal.SIGTERM)
        assert other.receive().kind == Kind.DRAIN
        server.process.send_signal(signal.SIGTERM)
        assert "finished=False" in server.ended(143)


def test_a_file_that_is_cut_under_its_mapping_is_mapped_again(environment: dict[str, str], data: Path) -> None:
    with serving(environment, "--data", str(data)) as server, server.client() as client:
        client.ask(Publish("orders", 0), batch(bytes(1 << 20)))
        assert values(client, "orders") == [bytes(1 << 20)]  # it is mapped now, and where the batch lies is known
        (segment,) = data.glob("topics/*/0/*.seg")
        os.truncate(segment, 0)
        with pytest.raises(EOFError):
            values(client, "orders")
        with pytest.raises(CorruptBatch, match="the file ends inside the batch"):
            values(server.client(), "orders")
        log = server.end()
        assert log.count("stored messages could not be sent: a file was cut, or the disk cannot read it") == 1


def test_a_memory_error_of_the_system_leaves_a_stack_on_stderr(environment: dict[str, str], data: Path) -> None:
    with serving(environment, "--data", str(data)) as server:
        log = server.end(signal.SIGBUS, -signal.SIGBUS)
        assert "Fatal Python error: Bus error" in log
        assert "in serve" in log


def test_server_goes_on_when_nobody_reads_its_output(environment: dict[str, str], data: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [*COMMAND, "--data", str(data), "--host", ""]
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, env=environment) as process:
        os.close(writing)
        assert process.stderr is not None
        for line in process.stderr:
            if b"stdout is closed" in line:
                break
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"{data}/headrace.sock")
        with NativeClient(sock) as client:
            client.hello()
        process.terminate()
        process.communicate(timeout=SOON_S)
        assert process.returncode == 0


# Configuration


def test_print_config_tells_what_counts_and_why(environment: dict[str, str], data: Path, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("port = 1\nheartbeat_ms = 1000\nconnections_max = 5\n[topic]\npartitions = 2\n")
    environ = {**environment, "HEADRACE_PORT": "2", "HEADRACE_HEARTBEAT_MS": "2000"}
    out, _ = run(environ, "--config", str(path), "--port", "3", "--data", str(data), "--print-config")
    assert "port = 3  # flag --port\n" in out
    assert "heartbeat_ms = 2000  # environment HEADRACE_HEARTBEAT_MS\n" in out
    assert f"connections_max = 5  # file {path}\n" in out
    assert "drain_seconds = 10.0  # default\n" in out
    assert f"partitions = 2  # file {path}\n" in out
    assert not data.exists(), "to print is all that it does"
    as_json = json.loads(run(environ, "--print-config", "--json")[0])
    assert (as_json["settings"]["port"], as_json["sources"]["port"]) == (2, "environment HEADRACE_PORT")
    assert as_json["settings"]["data"] == f"{environment['XDG_DATA_HOME']}/headrace"


def test_settings_have_effect(environment: dict[str, str], data: Path, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("auto_create_topics = false\n[topic]\npartitions = 3\n")
    with (
        serving(environment, "--config", str(path), "--data", str(data), "--log-format", "json") as server,
        server.client() as client,
    ):
        assert client.ask(TopicCreate("orders")).settings["partitions"] == 3
        with pytest.raises(LookupError):
            client.ask(Publish("others", 0), batch(b"x"))
        client.close()
        events = [json.loads(line) for line in server.end().splitlines()]
    assert [event["message"] for event in events] == ["ready", "draining", "stopped"]
    assert events[0]["port"] == server.ready["port"]


def test_bad_configuration_is_an_error_that_names_it(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("heartbeat = 1000\n")
    assert "did you mean heartbeat_ms?" in run(environment, "--config", str(path), code=1)[1]
    assert "HEADRACE_PORT" in run({**environment, "HEADRACE_PORT": "x"}, code=1)[1]
    assert "flag --port" in run(environment, "--port", "x", code=2)[1]
    assert "partitions" in run(environment, "--topic", "partitons=3", code=2)[1]
    assert "nobody could reach the broker" in run(environment, "--host", "", "--unix-socket", "", code=2)[1]
    beside = {**environment, "HEADRACE_UNIX_SOCKET": str(tmp_path / "s")}
    run(beside, "--host", "", "--data", ":memory:", "--print-config")
    error = json.loads(run(environment, "--config", str(path), "--json", code=1)[1])
    assert error["error"]["code"] == "invalid_argument"


def test_help_tells_of_settings_and_their_order(environment: dict[str, str]) -> None:
    out, _ = run(environment, "--help")
    for word in ("--data", "HEADRACE_HEARTBEAT_MS", "headrace.toml", "--print-config", "[7390]", "exit codes"):
        assert word in out
    assert out.index("1. flags") < out.index("2. environment") < out.index("3. a TOML file")


# Inside a program


@pytest.mark.parametrize("place", ["directory", "memory"])
def test_embedded_server_is_reached_through_a_pair_of_sockets(place: str, data: Path) -> None:
    server = EmbeddedServer(data if place == "directory" else ":memory:")
    with NativeClient(server.connect()) as client, NativeClient(server.connect()) as other:
        client.hello()
        other.hello()
        client.ask(Publish("orders", 0), batch(b"one"))
        assert values(other, "orders") == [b"one"]
    server.close()
    server.close()
    if place == "directory":
        again = EmbeddedServer(data)
        with NativeClient(again.connect()) as client:
            client.hello()
            assert values(client, "orders") == [b"one"]
        again.close()


PROGRAM = """
import os, sys
from headrace.model.errors import Forked, LogInUse
from headrace.server import EmbeddedServer
server = EmbeddedServer(sys.argv[1])
server.connect()
try:
    EmbeddedServer(sys.argv[1])
except LogInUse as error:
    assert str(os.getpid()) in str(error), error
else:
    raise AssertionError("two servers on the same data")
child = os.fork()
if not child:
    server.close()  # the parent's: nothing happens
    try:
        server.connect()
    except Forked:
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
server.connect()
print("done")
"""


def test_embedded_server_is_closed_when_the_program_ends_and_survives_a_fork(data: Path) -> None:
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(data)],
            capture_output=True,
            timeout=SOON_S,
            env=ENVIRONMENT,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, b"done\n"), done.stderr.decode()
        assert done.stderr == b""
