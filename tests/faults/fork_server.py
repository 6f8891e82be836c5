"""A process that forks brokers and their clients, each to be killed; forking is quicker than starting Python for each.

Run as: fork_server.py. Each line on its standard input is a command in JSON, each line on its standard output the
answer. When its standard input ends, or it dies, so do all that it forked.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.known import ENVIRONMENT

PATIENCE_S = 60.0
_PR_SET_PDEATHSIG = 1
_PRELOADED = (
    "headrace.cli.main",
    "headrace.cli.commands.serve",
    "headrace.server",
    "headrace.client._sync.bus",
    "headrace.client._async.bus",
    "uvloop",
)


class Nursery:
    """The test's end: starts processes and kills them. With it all of them end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True
        )

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=30)

    def start(self, name: str, role: str, *arguments: object) -> "Child":
        """Fork a process that calls a function, `module:function`; what it prints goes to a file of that name."""
        output = self.directory / f"{name}.log"
        pid = self._ask(start=role, arguments=list(arguments), output=str(output))
        return Child(self, name, pid, output)

    def ended(self, pid: int) -> int | None:
        """The wait status of a process that has ended."""
        status = self._ask(ended=pid)
        return None if status is None else int(status)

    def _ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks the others is gone"
        return json.loads(answer)


class Child:
    """A process that was forked."""

    def __init__(self, nursery: Nursery, name: str, pid: int, output: Path) -> None:
        self.name = name
        self.pid = pid
        self._nursery = nursery
        self._output = output
        self._status: int | None = None

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, and wait until it is gone; it must not have ended by itself."""
        self.check()
        self.signal(signal.SIGKILL)
        status = self.wait()
        assert status == signal.SIGKILL, f"{self.name} ended by itself ({status}):\n{self.said()}"

    def wait(self) -> int:
        """Wait for its end; returns the wait status."""
        deadline = time.monotonic() + PATIENCE_S
        while self._status is None:
            self._status = self._nursery.ended(self.pid)
            assert time.monotonic() < deadline, f"{self.name} does not end:\n{self.doing()}"
            time.sleep(0.001)
        return self._status

    def doing(self) -> str:
        """What it is just doing, and the end of what it printed."""
        self.signal(signal.SIGUSR1)
        time.sleep(1)
        return self.said()

    def check(self) -> None:
        """It must be alive."""
        if self._status is None:
            self._status = self._nursery.ended(self.pid)
        assert self._status is None, f"{self.name} ended by itself ({self._status}):\n{self.said()}"

    def said(self) -> str:
        """The end of what it printed."""
        return self._output.read_text(errors="replace")[-5000:] if self._output.exists() else ""


def _become(command: dict[str, Any]) -> None:
    """In the child: do what it is for, and end."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    silence = os.open(os.devnull, os.O_RDONLY)
    os.dup2(silence, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(silence)
    os.close(output)
    faulthandler.register(signal.SIGUSR1)
    code = 1
    try:
        module, function = command["start"].split(":")
        getattr(importlib.import_module(module), function)(*command["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return status if found else None


def main() -> None:
    """Fork what is asked for until nobody asks any more."""
    for name in _PRELOADED:
        importlib.import_module(name)
    children: set[int] = set()
    for line in sys.stdin:
        command = json.loads(line)
        answer: int | None
        if "start" in command:
            answer = os.fork()
            if not answer:
                _become(command)
            children.add(answer)
        else:
            answer = _ended(command["ended"])
            if answer is not None:
                children.discard(command["ended"])
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
