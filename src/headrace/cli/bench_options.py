"""Arguments and result table shared by the bench commands."""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.cli.arguments import add_json, more_than_zero
from headrace.cli.terminal.output import Output, ProgressLine
from headrace.model.errors import HeadraceError

_ROW = "{:{width}}  {:18}  {:>12}  {:>12}  {:>12}  {}"
_NAME_WIDTH = 26


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every bench command."""
    whole, real = more_than_zero(int), more_than_zero(float)
    parser.add_argument("--size", metavar="BYTES", type=whole, default=100, help="bytes per message (default: 100)")
    parser.add_argument("--batch", metavar="N", type=whole, default=1000, help="messages per batch (default: 1000)")
    parser.add_argument("--seconds", metavar="S", type=real, default=1.0, help="seconds per benchmark (default: 1)")
    add_json(parser)


def measure(run: Callable[..., None], given: argparse.Namespace, out: Output, **more: Any) -> int:
    """Run benchmarks in a directory, and print each result as soon as it is measured."""
    from headrace.bench.measure import WrongResult

    with _directory(given.directory) as directory, ProgressLine("measuring") as progress:
        if not out.json:
            out.tell({}, _line("benchmark", "of", "median", "lowest", "highest", "unit"))

        def emit(row: dict[str, Any]) -> None:
            progress.clear()
            out.tell(row, _row_text(row))
            progress(0)

        try:
            run(directory, seconds=given.seconds, size=given.size, batch=given.batch, emit=emit, **more)
        except WrongResult as error:
            raise HeadraceError(f"a benchmark failed: {error}") from error
    return 0


def _line(*cells: str) -> str:
    return _ROW.format(*cells, width=_NAME_WIDTH)


def _row_text(row: dict[str, Any]) -> str:
    name = row["name"].rpartition(".")[2]
    if row["median"] is None:
        return f"{name:{_NAME_WIDTH}}  {row['subject']:18}  {row.get('why', 'not measured')}"
    samples = row["samples"]
    shown = [f"{value:,}" for value in (row["median"], min(samples), max(samples))]
    return _line(name, row["subject"], *shown, row["unit"])


@contextmanager
def _directory(directory: str | None) -> Iterator[str]:
    if directory is not None:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="headrace-") as temporary:
        yield temporary
