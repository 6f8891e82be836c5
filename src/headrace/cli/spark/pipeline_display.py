"""Progress display of `headrace pipeline run`: lines redrawn on a terminal, or plain lines."""

import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.message_formats import time_text
from headrace.cli.setting_options import bytes_text
from headrace.cli.terminal.histogram import span_text
from headrace.cli.terminal.output import Output, counted, table

if TYPE_CHECKING:
    from headrace.spark.pipelines.progress import QueryProgress

COLUMNS = ("query", "batch", "rows/s in", "rows/s out", "lag", "took", "state rows", "state")
_REDRAWN_EVERY_S = 0.1
_CLEAR = "\x1b[K"


class Display:
    """Shows the progress of queries; Spark calls it on its own threads."""

    def __init__(self, out: Output, *, every_s: float, redrawn: bool) -> None:
        self._out = out
        self._every_s = every_s
        self._redrawn = redrawn
        self._lock = threading.Lock()
        self._last: dict[str, QueryProgress] = {}
        self._printed_s: dict[str, float] = {}
        self._lines = 0
        self._next_s = 0.0

    def show(self, progress: "QueryProgress") -> None:
        """Show the progress of a query."""
        with self._lock:
            before = self._last.get(progress.query)
            self._last[progress.query] = progress
            if self._out.json:
                self._out.tell(msgspec.to_builtins(progress))
            elif self._redrawn:
                self._redraw()
            elif before is None or not (before.idle and progress.idle):
                self._print(progress)

    def close(self) -> None:
        """Leave the last lines on the screen."""
        with self._lock:
            if self._redrawn and self._last:
                self._next_s = 0.0
                self._redraw()

    def _print(self, progress: "QueryProgress") -> None:
        now_s = time.monotonic()
        if now_s - self._printed_s.get(progress.query, -self._every_s) >= self._every_s:
            self._printed_s[progress.query] = now_s
            self._out.tell({}, line_of(progress))

    def _redraw(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _REDRAWN_EVERY_S
        columns = shutil.get_terminal_size().columns
        lines = [line[: columns - 1] for line in table(COLUMNS, *(row_of(each) for each in self._last.values()))]
        up = f"\x1b[{self._lines}A" if self._lines else ""
        print(up + "".join(f"\r{line}{_CLEAR}\n" for line in lines), end="", file=sys.stderr, flush=True)
        self._lines = len(lines)


def row_of(progress: "QueryProgress") -> tuple[object, ...]:
    """Return a query's progress as cells below `COLUMNS`."""
    return (
        progress.query,
        progress.batch,
        round(progress.rows_in_per_s),
        "-" if progress.rows_out_per_s is None else round(progress.rows_out_per_s),
        "-" if progress.lag is None else progress.lag,
        "idle" if progress.idle and not progress.batch_ms else span_text(progress.batch_ms * 1000),
        progress.state_rows,
        bytes_text(progress.state_bytes),
    )


def line_of(progress: "QueryProgress") -> str:
    """Return a query's progress as a line."""
    if progress.idle:
        parts = ["nothing to do"]
    else:
        parts = [f"{progress.rows_in_per_s:,.0f} rows/s in"]
        if progress.rows_out_per_s is not None:
            parts.append(f"{progress.rows_out_per_s:,.0f} rows/s out")
    if progress.lag is not None:
        parts.append(f"lag {progress.lag:,}")
    if progress.batch_ms:
        parts.append(f"took {span_text(progress.batch_ms * 1000)}")
    if progress.state_rows:
        parts.append(f"state {counted(progress.state_rows, 'row')}, {bytes_text(progress.state_bytes)}")
    return f"{time_text(progress.time_us)[:19]}Z {progress.query} batch {progress.batch}: {', '.join(parts)}"
