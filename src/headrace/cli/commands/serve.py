"""`headrace serve`: runs a broker."""

import argparse
import asyncio
import faulthandler
import gc
import logging
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from headrace.cli.arguments import add_json, completes
from headrace.cli.configuration import FIELDS, Configuration, configure, default_data, from_flags, topic_flag
from headrace.cli.setting_options import field_explanations, setting_text
from headrace.cli.terminal.interrupts import Interrupted, Interrupts
from headrace.cli.terminal.log_format import log_to_stderr
from headrace.cli.terminal.output import Output
from headrace.model.errors import InvalidArgument
from headrace.server import ClusterServer, Server, ServerSettings, new_event_loop

logger = logging.getLogger("headrace.server")

_DEST = "serve_"
_FILES_SPARE = 512
"""File descriptors reserved for segments, listening sockets and everything else that is not a connection."""
_YOUNG_OBJECTS_MAX = 10_000
"""The threshold of Python's garbage collector: more objects than concurrent requests of many clients allocate."""
_STDERR = 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_METAVARS = {
    "data": "DIR",
    "unix_socket": "PATH",
    "host": "HOST",
    "listen": "URL",
    "http_address": "HOST:PORT",
    "http_hosts": "HOST",
    "http_origins": "ORIGIN",
    "webhook_networks": "NETWORK",
    "http_webhook_origins": "HOST",
    "tls_certificate": "FILE",
    "tls_key": "FILE",
    "tls_key_password_file": "FILE",
    "tls_sni_certificates": "FILE",
    "tls_client_ca": "FILE",
    "tls_client_names": "KIND",
    "tls_min_version": "VERSION",
    "cluster": "NAME",
    "store": "URL",
    "node": "NAME",
    "zone": "TEXT",
    "advertise": "URL",
    "node_token_file": "FILE",
    "node_ca": "FILE",
    "node_certificate": "FILE",
    "node_key": "FILE",
    "store_credentials_file": "FILE",
}

_EPILOG = """\
examples:
  headrace serve
  headrace serve --data ./data --port 0 --log-format json
  headrace serve --listen headrace://127.0.0.1:7390 --listen unix:///run/headrace.sock
  headrace serve --http-address 127.0.0.1:8080 --http-origins https://app.example.org
  headrace serve --host 0.0.0.0 --topic partitions=4 --topic retain_seconds=7d
  headrace serve --host 0.0.0.0 --tls-certificate server.pem --tls-key server-key.pem
  HEADRACE_PORT=7400 headrace serve --config headrace.toml --print-config

Each setting is read from these sources, and the first that sets it wins:
  1. flags                      --heartbeat-ms 1000    --topic partitions=4
  2. environment                HEADRACE_HEARTBEAT_MS  HEADRACE_TOPIC_PARTITIONS
  3. a TOML file                heartbeat_ms = 1000    [topic] partitions = 4
  4. the defaults shown above
The file is --config, else $HEADRACE_CONFIG, else headrace/headrace.toml in
$XDG_CONFIG_HOME (~/.config) if it exists. --print-config prints the settings in
effect and their sources, as such a file. Sizes may be written like 256MiB, times
like 30s or 7d. Relative paths in a file are relative to the file.

When the broker is ready it prints one line with its addresses to stdout; the log
goes to stderr. SIGTERM and Ctrl-C drain: the broker tells its clients, which finish
and commit; then it syncs and closes everything. A second signal ends the wait.
SIGHUP does the same, but with tls_certificate it reloads the certificates, which
also happens by itself when their files change.

exit codes: 0 drained; 1 an error; 2 wrong usage; 130 or 143 ended by Ctrl-C or
SIGTERM before clients had finished.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace serve`."""
    parser.epilog = _EPILOG
    parser.set_defaults(run=serve, check=_check)
    add = parser.add_argument
    completes(add("--config", metavar="FILE", help="read settings from this TOML file"), "file")
    add("--print-config", action="store_true", help="print the settings in effect and their sources, and exit")
    add_json(parser)
    group = parser.add_argument_group("settings")
    explanations = field_explanations(ServerSettings)
    for name, field in FIELDS.items():
        if name == "topic":
            continue
        text = explanations.get(name, "").rstrip(".").replace("%", "%%")
        shown = default_data(os.environ) if name == "data" else field.default
        is_list = field.type == list[str]
        alone: dict[str, Any] = {"nargs": "?", "const": "yes"} if field.type is bool else {}
        text += "" if shown is None or shown == "" or is_list else f" [{setting_text(name, shown)}]"
        action = group.add_argument(
            f"--{name.replace('_', '-')}",
            dest=f"{_DEST}{name}",
            metavar=_metavar(name),
            default=argparse.SUPPRESS,
            action="append" if is_list else "store",
            help=f"{text}; may be repeated" if is_list else text,
            **alone,
        )
        if name == "data":
            completes(action, "directory")
        elif name == "unix_socket" or _METAVARS.get(name) == "FILE":
            completes(action, "file")
    group.add_argument(
        "--topic",
        dest="topic_defaults",
        metavar="NAME=VALUE",
        type=topic_flag,
        action="append",
        default=[],
        help="the default of a topic setting; see `headrace topic create --help`",
    )


def serve(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:  # noqa: ARG001 it has its own
    """Run the broker until a signal arrives."""
    configuration = configure(*_flags(given), given.config, os.environ)
    if given.print_config:
        out.tell(configuration.as_dict(), *configuration.as_toml().splitlines())
        return 0
    log_to_stderr(configuration.settings.log_level, configuration.settings.log_format)
    faulthandler.enable(_STDERR)  # a file that is cut under its mapping ends the process with SIGBUS
    _make_room_for_connections(configuration.settings.connections_max)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(configuration, out))


async def _serve(configuration: Configuration, out: Output) -> int:
    settings = configuration.settings
    server = ClusterServer(settings) if settings.clustered else Server(settings)
    signals = _Signals(asyncio.get_running_loop())
    try:
        with signals.ending_the_start():
            await server.start()
    except asyncio.CancelledError:
        if not signals.number:
            raise
        return 128 + signals.number
    gc.freeze()  # what exists now stays: collections need not scan it again
    gc.set_threshold(_YOUNG_OBJECTS_MAX, 10, 10)
    if server.tls is not None:
        signals.reload_with(server.tls.reload)
    _tell_ready(server, out)
    await _until_signal(signals, server)
    finished = await server.stop(hurry=signals.second)
    return 0 if finished else 128 + signals.number


async def _until_signal(signals: "_Signals", server: Server | ClusterServer) -> None:
    """Wait for the first signal; a node of a cluster that cannot go on raises why."""
    if isinstance(server, Server):
        await signals.first.wait()
        return
    waiting = asyncio.create_task(signals.first.wait())
    ended = asyncio.create_task(server.wait_ended())
    await asyncio.wait([waiting, ended], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    ended.cancel()


class _Signals:
    """While the server starts, a signal ends that; later the first starts draining, and the second ends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.number = 0
        self._loop = loop
        self._main = asyncio.current_task()
        self._starts = False
        self._reloads: set[asyncio.Future[object]] = set()
        # Those that are ignored stay so: nohup, or a shell's background job.
        self._numbers = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    @contextmanager
    def ending_the_start(self) -> Iterator[None]:
        """In the block a signal ends what this task does; after it, the loop's handlers are in place."""
        before = {number: signal.signal(number, self._end_start) for number in self._numbers}
        self._starts = True
        try:
            yield
        except BaseException:
            for number, handler in before.items():
                signal.signal(number, handler)
            raise
        finally:
            self._starts = False
        for number in self._numbers:
            self._loop.add_signal_handler(number, self._came, number)
        if self.number:  # a gateway did not heed it
            self.first.set()

    def reload_with(self, reload: Callable[[], Awaitable[object]]) -> None:
        """Reload certificates on SIGHUP, instead of draining; also where it was ignored."""

        def start() -> None:
            task = asyncio.ensure_future(reload())
            self._reloads.add(task)  # or nobody would hold it
            task.add_done_callback(self._reloads.discard)

        self._loop.add_signal_handler(signal.SIGHUP, start)

    def _end_start(self, number: int, _: FrameType | None) -> None:
        first, self.number = not self.number, number
        if first and asyncio.current_task(self._loop) is self._main:
            raise Interrupted(number)  # it is at work, such as on the recovery of data, and may not wait for long
        # The loop waits, or runs something else, where an exception would only be logged.
        self._loop.call_soon_threadsafe(self._cancel_start)

    def _cancel_start(self) -> None:
        if self._starts and self._main is not None:
            self._main.cancel()

    def _came(self, number: int) -> None:
        self.number = number
        (self.second if self.first.is_set() else self.first).set()


def _tell_ready(server: Server | ClusterServer, out: Output) -> None:
    """Report on stdout and in the log that the server is ready, and its addresses."""
    where: dict[str, Any] = {
        "listening": [f"{_bracketed(host)}:{port}" for host, port in server.addresses],
        "port": server.addresses[0][1] if server.addresses else None,
        "unix_socket": server.socket_path or None,
        "addresses": server.listening,
        "data": server.settings.data,
        "pid": os.getpid(),
    }
    native = ("headrace://", "headrace+unix://")
    urls = sorted(server.listening, key=lambda url: url.startswith("headrace+unix://"))  # paths last: they are long
    places = [url if not url.startswith(native) else url.partition("://")[2] for url in urls]
    logger.info(
        "ready", extra={**where, "listening": ",".join(where["listening"]), "addresses": ",".join(server.listening)}
    )
    try:
        text = f"headrace: ready on {' and '.join(places)}, data in {server.settings.data}, process {os.getpid()}"
        out.tell({"ready": True, **where}, text)
    except BrokenPipeError:
        logger.info("ready line not written: stdout is closed")


def _make_room_for_connections(connections_max: int) -> None:
    """Raise the limit on open files to what the connections need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + _FILES_SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def _check(given: argparse.Namespace) -> str | None:
    """Check the flags; returns the text of the error, if there is one."""
    try:
        flags, topic_flags = _flags(given)
        from_flags(flags, topic_flags)
        # Checks the flags without the environment and the file, which may name a socket.
        configure({"unix_socket": "any", **flags}, topic_flags, os.devnull, {})
    except InvalidArgument as error:
        return str(error)
    return None


def _flags(given: argparse.Namespace) -> tuple[dict[str, str | list[str]], dict[str, str]]:
    flags = {name.removeprefix(_DEST): text for name, text in vars(given).items() if name.startswith(_DEST)}
    return flags, dict(given.topic_defaults)


def _metavar(name: str) -> str:
    if name in _METAVARS:
        return _METAVARS[name]
    kind = FIELDS[name].type
    return {bool: "YES|NO", int: "N", float: "SECONDS"}.get(kind, "WORD")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
