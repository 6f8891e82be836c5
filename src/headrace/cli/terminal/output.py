"""Where a command's words go: results to stdout, errors, notes and progress to stderr."""

import json
import os
import select
import sys
import time
from collections.abc import Sequence
from typing import Any

from headrace.cli.terminal.colours import paint, width

EXIT_ERROR = 1
EXIT_USAGE = 2

_FULL_BYTES = 64 << 10
_PROGRESS_EVERY_S = 0.1
_CLEAR_LINE = "\r\x1b[K"


class Output:
    """Prints to stdout in pieces of whole lines, as text or as JSON."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.json = as_json
        """Whether programs read along: one JSON object a line."""
        self._fd = _fd_of_stdout()
        self._waiting = bytearray()

    @property
    def full(self) -> bool:
        """Whether enough waits to be printed."""
        return len(self._waiting) >= _FULL_BYTES

    @property
    def closed(self) -> bool:
        """Whether whoever read our output has gone, as `head` does."""
        if self._fd is None:
            return False
        poll = select.poll()
        poll.register(self._fd, 0)
        return any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))

    def add(self, line: bytes) -> None:
        """Print bytes, with the next `flush`."""
        self._waiting += line

    def tell(self, content: dict[str, Any], *lines: str) -> None:
        """Print a result, as JSON or as lines of text, at once."""
        for line in [_json(content)] if self.json else lines:
            self.add(
                line.encode("utf-8", "surrogateescape") + b"\n"
            )  # a path is printed as it is, even if it is not UTF-8
        self.flush()

    def flush(self) -> None:
        """Hand over everything that waits."""
        # Not through sys.stdout: what it could not write it would try again when Python ends, with a traceback.
        waiting, self._waiting = self._waiting, bytearray()
        with memoryview(waiting) as left:
            done = 0
            while done < len(left) and self._fd is not None:
                try:
                    done += os.write(self._fd, left[done:])
                except BlockingIOError:  # a terminal that another program has set so
                    select.select([], [self._fd], [])

    def note(self, text: str) -> None:
        """Say something by the way on stderr."""
        say({"note": text}, f"{paint('headrace:', 'warning', stream='stderr')} {text}", as_json=self.json)


class ProgressLine:
    """One line on stderr that tells how far long work has come; nothing unless a person sees it."""

    def __init__(self, what: str, total: int | None = None, *, shown: bool = True) -> None:
        self._what = what
        self._total = total
        self._shown = shown and sys.stderr is not None and sys.stderr.isatty()
        self._next_s = 0.0

    def __enter__(self) -> "ProgressLine":
        self._show(self._what)
        return self

    def __exit__(self, *_: object) -> None:
        self._show("")

    def __call__(self, done: int) -> None:
        """Tell how much is done."""
        now_s = time.monotonic()
        if self._shown and now_s >= self._next_s:
            self._next_s = now_s + _PROGRESS_EVERY_S
            share = f" {min(done * 100 // self._total, 100)} %" if self._total else f" {done:,}" if done else ""
            self._show(f"{self._what}{share}")

    def say(self, what: str) -> None:
        """Tell what is being done now."""
        self._what = what
        self(0)

    def _show(self, text: str) -> None:
        if self._shown:
            print(_CLEAR_LINE + text, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Make way for a line on stdout."""
        self._show("")
        self._next_s = 0.0


def say(content: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print to stderr, as JSON or as text; when nobody can see that, nothing is to be done."""
    if sys.stderr is None:
        return
    try:
        # Python gives stderr an error handler that copes with every character.
        print(_json(content) if as_json else text, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def let_go_of_stdout() -> None:
    """Flush what argparse has printed, now: when Python ends it is too late to deal with a closed pipe."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _silence(sys.stdout)


def counted(count: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "message"), counted(1234, "message")
    ('1 message', '1,234 messages')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def table(*rows: Sequence[object]) -> list[str]:
    """Rows as lines, in columns; numbers stand right, and the first row is the heading.

    >>> table(("topic", "lag"), ("orders", 1234), ("a", 5))
    ['topic     lag', 'orders  1,234', 'a           5']
    """
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    right = [any(isinstance(cell, int) for cell in column) for column in zip(*rows, strict=True)]
    heading, *lines = (
        "  ".join(
            " " * (wide - width(cell)) + cell if to_right else cell + " " * (wide - width(cell))
            for cell, wide, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )
    return [paint(heading, "heading"), *lines]


def offsets_text(first: int, following: int) -> str:
    """A range of offsets.

    >>> offsets_text(3, 4), offsets_text(3, 6)
    ('offset 3', 'offsets 3 to 5')
    """
    return f"offset {first}" if following - first == 1 else f"offsets {first} to {following - 1}"


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))


def _fd_of_stdout() -> int | None:
    return None if sys.stdout is None else sys.stdout.fileno()


def _silence(stream: Any) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
