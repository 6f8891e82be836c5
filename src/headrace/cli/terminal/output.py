"""Output of the commands: results to stdout; errors, notes and progress to stderr."""

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
    """Buffers whole lines and prints them to stdout, as text or as JSON."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.json = as_json
        """Whether to print JSON, one object per line."""
        self._fd = _fd_of_stdout()
        self._waiting = bytearray()

    @property
    def full(self) -> bool:
        """Whether the buffer is large enough to be printed."""
        return len(self._waiting) >= _FULL_BYTES

    @property
    def closed(self) -> bool:
        """Whether the reader of stdout has closed the pipe, as `head` does."""
        if self._fd is None:
            return False
        poll = select.poll()
        poll.register(self._fd, 0)
        return any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))

    def add(self, line: bytes) -> None:
        """Buffer bytes for the next `flush`."""
        self._waiting += line

    def tell(self, content: dict[str, Any], *lines: str) -> None:
        """Print a result immediately, as JSON or as lines of text."""
        for line in [_json(content)] if self.json else lines:
            self.add(
                line.encode("utf-8", "surrogateescape") + b"\n"
            )  # a path is printed as it is, even if it is not UTF-8
        self.flush()

    def flush(self) -> None:
        """Write the buffer to stdout."""
        # Not through sys.stdout: it would retry a failed write when Python exits, and print a traceback.
        waiting, self._waiting = self._waiting, bytearray()
        with memoryview(waiting) as left:
            done = 0
            while done < len(left) and self._fd is not None:
                try:
                    done += os.write(self._fd, left[done:])
                except BlockingIOError:  # another program has made the terminal non-blocking
                    select.select([], [self._fd], [])

    def note(self, text: str) -> None:
        """Print a note on stderr."""
        say({"note": text}, f"{paint('headrace:', 'warning', stream='stderr')} {text}", as_json=self.json)


class ProgressLine:
    """A progress line on stderr for long operations; silent if stderr is not a terminal."""

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
        """Show how much is done."""
        now_s = time.monotonic()
        if self._shown and now_s >= self._next_s:
            self._next_s = now_s + _PROGRESS_EVERY_S
            share = f" {min(done * 100 // self._total, 100)} %" if self._total else f" {done:,}" if done else ""
            self._show(f"{self._what}{share}")

    def of(self, done: int, total: int) -> None:
        """Show how much of how much is done."""
        self._total = total
        self(done)

    def say(self, what: str) -> None:
        """Show the current activity."""
        self._what = what
        self(0)

    def _show(self, text: str) -> None:
        if self._shown:
            print(_CLEAR_LINE + text, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the progress line before a line on stdout."""
        self._show("")
        self._next_s = 0.0


def say(content: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print an error to stderr, as JSON or as text; ignores a closed stderr."""
    if sys.stderr is None:
        return
    try:
        # Python gives stderr an error handler that copes with every character.
        print(_json(content) if as_json else text, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def let_go_of_stdout() -> None:
    """Flush the output of argparse now: when Python exits it is too late to handle a closed pipe."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _silence(sys.stdout)


def counted(count: int, noun: str) -> str:
    """Format a number and its noun.

    >>> counted(1, "message"), counted(1234, "message")
    ('1 message', '1,234 messages')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def table(*rows: Sequence[object]) -> list[str]:
    """Format rows as lines with aligned columns, numbers to the right; the first row is the heading.

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
    """Format a range of offsets.

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
