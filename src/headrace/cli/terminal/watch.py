"""`--watch`: runs a command repeatedly and redraws its output."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Mapping

from headrace.cli.arguments import duration
from headrace.cli.message_formats import time_text
from headrace.cli.terminal.colours import paint
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output
from headrace.model.errors import HeadraceError

_EVERY_S = 2.0
_WRAP_OFF, _WRAP_ON = b"\x1b[?7l", b"\x1b[?7h"
_CLEAR_REST_OF_LINE, _CLEAR_BELOW = b"\x1b[K", b"\x1b[J"


def add_watch(*parsers: argparse.ArgumentParser) -> None:
    """Add the option --watch."""
    for parser in parsers:
        parser.add_argument(
            "--watch",
            metavar="SECONDS",
            nargs="?",
            type=_interval,
            const=_EVERY_S,
            help="repeat every SECONDS (default: 2) until Ctrl-C",
        )


def _interval(text: str) -> float:
    try:
        return duration(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; a value after --watch is its interval: put it last") from error


def watch(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Run a command repeatedly, until it fails permanently or a signal arrives."""
    screen = _Screen(out, given.watch) if _on_terminal(os.environ) and not out.json else None
    shown = 0
    try:
        while True:
            frame = out if out.json else _Frame()
            try:
                given.run(given, frame, interrupts)
            except HeadraceError as error:
                if not shown or not error.retryable:
                    raise
                frame.note(f"{error} [{error.code}]")
            if isinstance(frame, _Frame):
                _show(frame.content(), out, screen, shown)
            shown += 1
            time.sleep(given.watch)
    finally:
        if screen is not None:
            screen.leave()


def _show(content: bytes, out: Output, screen: "_Screen | None", shown: int) -> None:
    if screen is not None:
        screen.draw(content)
        return
    out.add((b"\n" if shown else b"") + f"at {time_text(time.time_ns() // 1000)}\n".encode() + content)
    out.flush()


def _on_terminal(environ: Mapping[str, str]) -> bool:
    return sys.stdout is not None and sys.stdout.isatty() and environ.get("TERM") != "dumb"


class _Frame(Output):
    """Collects the output of one run, notes included."""

    def flush(self) -> None:
        """Keep it."""

    def note(self, text: str) -> None:
        """Collect a note."""
        self.add(f"{paint('headrace:', 'warning')} {text}\n".encode("utf-8", "surrogateescape"))

    def content(self) -> bytes:
        """Return the collected output."""
        return bytes(self._waiting)


class _Screen:
    """Redraws the frame in place, and leaves the last frame on the screen."""

    def __init__(self, out: Output, every_s: float) -> None:
        self._out = out
        self._every_s = every_s
        self._drawn = 0
        """The number of lines in the last frame."""

    def draw(self, content: bytes) -> None:
        """Replace the last frame by this one, cut to the height of the terminal."""
        lines = content.splitlines()
        rows = max(shutil.get_terminal_size().lines - 2, 1)
        if len(lines) > rows:
            lines = [*lines[: rows - 1], f"({len(lines) - rows + 1} more lines do not fit)".encode()]
        now = time_text(time.time_ns() // 1_000_000 * 1000)[:19].replace("T", " ")
        lines.insert(0, paint(f"every {self._every_s:g} s, last at {now} UTC; Ctrl-C ends", "aside").encode())
        back = b"\x1b[%dF" % self._drawn if self._drawn else b""
        self._out.add(_WRAP_OFF + back + b"".join(line + _CLEAR_REST_OF_LINE + b"\n" for line in lines) + _CLEAR_BELOW)
        self._out.flush()
        self._drawn = len(lines)

    def leave(self) -> None:
        """Restore line wrapping, and move the cursor to the start of a line, over the terminal's ^C."""
        self._out.add(_WRAP_ON + b"\r" + _CLEAR_REST_OF_LINE)
        self._out.flush()
