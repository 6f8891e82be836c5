"""Measures how long an event loop is held up: a heartbeat on a broker's loop, or on an idle one, in another process."""

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.bench.measure import WrongResult
from headrace.cli.commands.serve import _YOUNG_OBJECTS_MAX
from headrace.server import Server, new_event_loop, server_settings

HEARTBEAT_S = 0.001
_PATIENCE_S = 30.0


class Heartbeat:
    """Beats on an event loop, and keeps by how much the latest of the beats was late."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due_s = 0.0
        self.reset()
        self._again()

    def reset(self) -> None:
        """Begin anew: what was before does not count."""
        self.late_s = 0.0
        self.beats = 0
        self._due_s = time.perf_counter() + HEARTBEAT_S

    def observe(self) -> None:
        """Note how late it is by now, though there was no beat."""
        self.late_s = max(self.late_s, time.perf_counter() - self._due_s)

    def _beat(self) -> None:
        self.observe()
        self.beats += 1
        self._again()

    def _again(self) -> None:
        self._due_s = time.perf_counter() + HEARTBEAT_S
        self._loop.call_later(HEARTBEAT_S, self._beat)


class Watch:
    """What a metered loop was seen to do."""

    late_s = 0.0
    """The longest time that nothing else had its turn."""
    beats = 0
    seconds = 0.0


class MeteredLoop:
    """A process with an event loop whose pauses are measured, and on which nothing else happens."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._arguments: list[str] = []
        self.address = ""
        """Where clients connect to, if it is a broker's."""

    def start(self) -> None:
        """Start the process; returns when the loop runs."""
        command = [sys.executable, "-m", "benchmarks.loop_pauses", *self._arguments]
        root = Path(__file__).parents[1]
        path = os.pathsep.join([str(root), str(Path(sys.modules["headrace"].__file__ or "").parents[1])])
        with open(os.path.join(self._place, "metered-loop.log"), "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        try:
            self.address = self._said()["address"]
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @contextlib.contextmanager
    def watched(self) -> Iterator[Watch]:
        """Measure the pauses within the block; afterwards the watch has them."""
        watch = Watch()
        begin_s = time.perf_counter()
        self._ask("watch")
        yield watch
        said = self._ask("tell")
        watch.seconds = time.perf_counter() - begin_s
        watch.late_s, watch.beats = said["late_s"], said["beats"]

    def _ask(self, question: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WrongResult(f"the metered process has ended: {self._last_words()}") from None
        return self._said()

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WrongResult(f"the metered process has ended: {self._last_words()}")
        said: dict[str, Any] = json.loads(line)
        return said

    @property
    def logged(self) -> str:
        """What the process has logged."""
        return Path(self._place, "metered-loop.log").read_text(encoding="utf-8", errors="replace")

    def _last_words(self) -> str:
        return self.logged[-500:].strip()


class MeteredBroker(MeteredLoop):
    """A broker in a process of its own, the pauses of whose event loop are measured."""

    def __init__(self, place: str, **settings: Any) -> None:
        """A broker with settings of `headrace serve`, its data below a directory."""
        super().__init__(place)
        self.data = os.path.join(place, "data")
        """Its data directory."""
        self._arguments = [json.dumps({"data": self.data, "host": "127.0.0.1", "port": 0, **settings})]


class Event(NamedTuple):
    """Something large that happens to a broker while the pauses of its event loop are measured."""

    under: str
    """What it is called in `params`."""
    n: int
    """How large it is."""
    happen: Callable[[MeteredBroker], Watch]
    """Has it happen once, in a block of `watched`, and checks that it did; called for each sample."""
    prepare: Callable[[MeteredBroker], None] | None = None
    """Called once, when the broker has started."""
    settings: Mapping[str, Any] = {}
    """Of the broker."""


async def _run(settings: dict[str, Any] | None) -> None:
    """Answer the questions on standard input until it ends."""
    loop = asyncio.get_running_loop()
    server, address = None, ""
    if settings is not None:
        server = Server(server_settings(settings))
        await server.start()
        host, port = server.addresses[0]
        address = f"headrace://{host}:{port}"
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS_MAX, 10, 10)
    heartbeat = Heartbeat(loop)
    ended = asyncio.Event()

    def answer(question: str) -> None:
        if question == "watch":
            heartbeat.reset()
        heartbeat.observe()
        _say({"late_s": heartbeat.late_s, "beats": heartbeat.beats})

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(answer, line.strip())
        loop.call_soon_threadsafe(ended.set)

    _say({"address": address})
    threading.Thread(target=listen, daemon=True).start()
    await ended.wait()
    if server is not None:
        hurry = asyncio.Event()
        hurry.set()
        await server.stop(hurry)


def _say(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a metered loop; standard input asks, standard output answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="?", type=json.loads, help="of the broker, as JSON; without it there is none")
    logging.basicConfig(level=logging.INFO)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_run(parser.parse_args(arguments).settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
