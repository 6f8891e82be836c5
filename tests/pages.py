"""Runs what a page of documentation shows, as a reader would, and compares it with what the page says comes out.

A page's blocks are run in order, in a directory of the page's own:

- `python`: run in one namespace for the whole page. A `text` block that follows is what it prints.
- `console`: each line that begins with `$ ` is run by a shell; what follows is what it prints. A command that ends
  with `&` goes on until the page ends; the next comes when it has said something.
- `sh`: commands, one a line, without what they print.
- any block with a title is saved as a file of that name.

tests/acceptance/test_examples.py lists the few blocks that are only shown.

`...` in what is printed stands for anything. The broker's usual addresses stand for free ones of this machine.
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.known import ENVIRONMENT

import headrace

ROOT = Path(__file__).parents[1]
USUAL_ADDRESS = "127.0.0.1:7390"
USUAL_HTTP_ADDRESS = "127.0.0.1:7391"
READY_S = 20
COMMAND_S = 60

_FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str | None
    text: str
    line: int
    follows: bool
    """Whether nothing but empty lines is between it and the block before."""


def needs_spark(page: Path) -> bool:
    """Whether a page tells its readers to install Spark."""
    return "headrace[spark]" in page.read_text(encoding="utf-8") and page.name != "install.md"


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    end = 0
    for fence in _FENCE.finditer(page):
        follows = bool(found) and not page[end : fence.start()].strip()
        found.append(Block(fence[1], fence[2], fence[3], page.count("\n", 0, fence.start()) + 2, follows))
        end = fence.end()
    return found


def is_run(block: Block) -> bool:
    """Whether a reader runs it."""
    return block.language in ("python", "console", "sh") and block.title is None


def is_output(block: Block, before: Block | None) -> bool:
    """Whether it is what the block before it prints."""
    return block.language == "text" and block.follows and before is not None and is_run(before)


def links(page: str) -> list[str]:
    """Where a page's links lead, but for those to other sites."""
    prose = _FENCE.sub("", page)
    return [target for target in _LINK.findall(prose) if "://" not in target]


class Reader:
    """Does what a page shows, in a directory that is the current one meanwhile."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._namespace: dict[str, Any] = {"__name__": "page"}
        self._running: list[subprocess.Popen[bytes]] = []
        self._address = f"127.0.0.1:{_free_port()}"
        self._http_address = f"127.0.0.1:{_free_port()}"
        self._environment = {
            **{name: text for name, text in ENVIRONMENT.items() if not name.startswith("HEADRACE_")},
            "XDG_CONFIG_HOME": str(directory),
            "XDG_DATA_HOME": str(directory),
            "PATH": f"{directory}/bin{os.pathsep}{os.environ['PATH']}",
            "HEADRACE_PORT": self._address.split(":")[1],
            "HEADRACE_URL": f"headrace://{self._address}",
        }
        (directory / "bin").mkdir()
        for name, module in (
            ("headrace", " -m headrace"),
            ("python", ""),
            ("pytest", " -m pytest -p no:cacheprovider"),
        ):
            shim = directory / "bin" / name
            shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{module} "$@"\n')
            shim.chmod(0o755)

    def read(self, name: str, page: str) -> None:
        """Do all that the page shows; an AssertionError says in which line it is wrong."""
        shown = [each._replace(text=self.here(each.text)) for each in blocks(page)]
        for block, following in zip(shown, [*shown[1:], None], strict=True):
            where = f"{name}, line {block.line}"
            if block.title:
                (self.directory / block.title).write_text(block.text)
            elif block.language == "python":
                expects = following is not None and following.language == "text" and following.follows
                self._python(where, block, following.text if following and expects else None)
            elif block.language == "console":
                for command, printed in _commands(block.text):
                    self._command(f"{where}: {command}", command, printed)
            elif block.language == "sh":
                for command in block.text.splitlines():
                    self._command(f"{where}: {command}", command, None)

    def start(self, where: str, command: str, printed: str | None = None) -> None:
        """Run a command that goes on until the end, and wait until it has said something."""
        said, logged = (self.directory / f"{what}-{len(self._running)}" for what in ("said", "logged"))
        with said.open("wb") as file, logged.open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.directory,
                env=self._environment,
                stdout=file,
                stderr=log,
                start_new_session=True,
            )
        self._running.append(process)
        deadline = time.monotonic() + READY_S
        while not said.read_text().endswith("\n"):
            assert process.poll() is None, f"{where}\nended:\n{logged.read_text()}"
            assert time.monotonic() < deadline, f"{where}\nsays nothing:\n{logged.read_text()}"
            time.sleep(0.02)
        if printed:
            _compare(where, printed, said.read_text())

    def close(self) -> None:
        """End what the page has started."""
        for bus in self._namespace.values():
            if isinstance(bus, headrace.Bus):
                bus.close()
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._running:
            assert process.wait(READY_S) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)

    def here(self, text: str) -> str:
        """A text of the page with the addresses of this reader's broker."""
        return text.replace(USUAL_ADDRESS, self._address).replace(USUAL_HTTP_ADDRESS, self._http_address)

    def _python(self, where: str, block: Block, printed: str | None) -> None:
        # Empty lines before make the line numbers of a traceback those of the page.
        code = compile("\n" * (block.line - 1) + block.text, where, "exec")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, self._namespace)
        if printed is not None:
            _compare(where, printed, out.getvalue())

    def _command(self, where: str, command: str, printed: str | None) -> None:
        if command.endswith("&"):
            self.start(where, command.removesuffix("&"), printed)
            return
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"{where}\nended with {done.returncode}:\n{done.stdout}"
        if printed is not None:
            _compare(where, printed, done.stdout)


@contextlib.contextmanager
def reader(directory: Path) -> Iterator[Reader]:
    """A reader who cleans up."""
    before = Path.cwd()
    os.chdir(directory)
    reading = Reader(directory)
    try:
        yield reading
    finally:
        os.chdir(before)
        reading.close()


def _commands(text: str) -> Iterator[tuple[str, str]]:
    """Commands, with what they print."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        while command.endswith("\\"):
            more, _, printed = printed.partition("\n")
            command = command.removesuffix("\\") + more
        yield command.rstrip(), printed


def _compare(where: str, wanted: str, got: str) -> None:
    if got and not got.endswith("\n"):
        got += "\n"  # on a page every line ends
    same = doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS)
    assert same, (
        f"{where}\nthe page says:\n{textwrap.indent(wanted, '    ')}\nbut it is:\n{textwrap.indent(got, '    ')}"
    )


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port
