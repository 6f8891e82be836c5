"""Runs groups of benchmarks and prints a line of JSON for each figure and subject, or a table."""

import argparse
import importlib
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import against
from headrace.bench.measure import SAMPLES_MIN, Benchmark, WrongResult, measure

GROUPS = ("storage", "broker", "leased", "bus", "scaling", "http", "security", "cluster", "spark")
"""Each is a module here, whose `benchmarks()` tells what to measure."""
SAMPLE_S = 0.5
"""What a sample lasts, about."""
_IN_MEMORY = ("tmpfs", "ramfs")

Chosen = list[tuple[str, Benchmark]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; returns the exit status."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.samples < 1 or asked.runs < 1 or not asked.seconds > 0:
        parser.error("--samples, --runs and --seconds must be more than 0")
    if asked.against is not None:
        return _compare(asked)
    if not asked.groups:
        parser.error(f"name a GROUP: {', '.join(GROUPS)}")
    try:
        chosen = choose(asked.groups, asked.only, asked.subject)
    except ValueError as error:
        parser.error(str(error))
    # Servers that were started are stopped on the way out, also when somebody else ends this.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        _print(run(chosen, asked.directory or disk_directory(), asked, _say), markdown if asked.markdown else None)
    except WrongResult as error:
        print(f"benchmarks: WRONG RESULT: {error}", file=sys.stderr)
        return 1
    return 0


def _print(found: Iterable[dict[str, Any]], table: Callable[[list[dict[str, Any]]], str] | None) -> None:
    """Each line when it comes, or all of them as a table."""
    lines: list[dict[str, Any]] = []
    for line in found:
        lines.append(line)
        if table is None:
            print(json.dumps(line, ensure_ascii=False), flush=True)
    if table is not None:
        print(table(lines))


def _compare(asked: argparse.Namespace) -> int:
    """Measure this checkout and another revision in turn."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    groups = asked.groups or list(against.HOT)
    only = asked.only or ([] if asked.groups else [name for names in against.HOT.values() for name in names])
    arguments = [*groups, *(word for name in only for word in ("--only", name)), "--seconds", str(asked.seconds)]
    directory = asked.directory or disk_directory()
    try:
        found = against.compare(Path(__file__).parents[1], asked.against, arguments, asked.runs, directory, _say)
        _print(found, ratios if asked.markdown else None)
    except against.CannotCompare as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/run", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"what to measure: {', '.join(GROUPS)}")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this benchmark; may be repeated")
    parser.add_argument("--subject", action="append", metavar="S", help="only this subject; may be repeated")
    parser.add_argument("--samples", type=int, default=SAMPLES_MIN, help="of each subject (%(default)s)")
    parser.add_argument("--seconds", type=float, default=SAMPLE_S, help="that a sample lasts, about (%(default)s)")
    parser.add_argument("--directory", help="where to write, instead of a temporary directory on a disk")
    hot = ", ".join(f"{group}.{name}" for group, names in against.HOT.items() for name in names)
    parser.add_argument(
        "--against",
        metavar="REV",
        help="measure this checkout and a revision of git in turn, and print new/old of what the subject headrace has; "
        f"without GROUP: {hot}",
    )
    parser.add_argument(
        "--runs", type=int, default=against.RUNS, help="of each of the two, with --against (%(default)s)"
    )
    parser.add_argument("--markdown", action="store_true", help="print a table rather than JSON")
    return parser


def choose(groups: Iterable[str], only: Sequence[str] | None, subjects: Sequence[str] | None) -> Chosen:
    """The benchmarks asked for, with no more figures and subjects than that; ValueError for a name there is not."""
    found: Chosen = []
    for group in dict.fromkeys(groups):
        if group not in GROUPS:
            raise ValueError(f"there is no group {group}; there are: {', '.join(GROUPS)}")
        found += [(group, one) for one in importlib.import_module(f"benchmarks.{group}").benchmarks()]
    names = [f"{group}.{name}" for group, benchmark in found for name in benchmark.figures]
    for name in only or ():
        if name not in names and not any(known.partition(".")[2] == name for known in names):
            raise ValueError(f"there is no benchmark {name}; there are: {', '.join(names)}")
    known_subjects = dict.fromkeys(subject.name for _, benchmark in found for subject in benchmark.subjects)
    for subject in subjects or ():
        if subject not in known_subjects:
            raise ValueError(f"there is no subject {subject}; there are: {', '.join(known_subjects)}")
    reduced = [(group, _reduced(group, benchmark, only, subjects)) for group, benchmark in found]
    return [(group, benchmark) for group, benchmark in reduced if benchmark.figures and benchmark.subjects]


def _reduced(group: str, benchmark: Benchmark, only: Sequence[str] | None, subjects: Sequence[str] | None) -> Benchmark:
    figures = {
        name: figure
        for name, figure in benchmark.figures.items()
        if only is None or name in only or f"{group}.{name}" in only
    }
    kept = [subject for subject in benchmark.subjects if subjects is None or subject.name in subjects]
    return benchmark._replace(figures=figures, subjects=kept)


def run(
    chosen: Chosen, directory: str, asked: argparse.Namespace, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Measure, in a directory made and removed below the one given."""
    with tempfile.TemporaryDirectory(prefix="headrace-benchmarks-", dir=directory) as root:
        kind = filesystem(root)
        say(f"in {root} ({kind}), Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()}")
        if kind in _IN_MEMORY:
            say("this directory is in memory, not on a disk: what is synced here means nothing")
        for group, benchmark in chosen:
            yield from measure(group, benchmark, root, seconds=asked.seconds, samples=asked.samples, say=say)


def markdown(lines: Iterable[dict[str, Any]]) -> str:
    """The lines as a table."""
    lines = list(lines)
    ours: dict[tuple[str, str], float | None] = {}
    for line in lines:
        if line["subject"] == "headrace":
            ours.setdefault((line["name"], _under(line)), line["median"])  # of several points the first
    rows = ["| name | subject | median | unit | ratio to headrace |", "|---|---|--:|---|--:|"]
    for line in lines:
        median, own = line["median"], ours.get((line["name"], _under(line)))
        shown = f"– ({line['why']})" if median is None else f"{median:,}"
        ratio = f"{median / own:.3g}" if median is not None and own else "–"
        rows.append(f"| {_title(line)} | {line['subject']} | {shown} | {line['unit']} | {ratio} |")
    return "\n".join(rows)


def ratios(lines: Iterable[dict[str, Any]]) -> str:
    """The lines of a comparison as a table."""
    rows = ["| name | old | new | new/old | middle half | better |", "|---|--:|--:|--:|---|---|"]
    for line in lines:
        params = line["params"]
        low, high = params.get("quartiles", ("–", "–"))
        median = f"– ({line['why']})" if line["median"] is None else line["median"]
        old, new = (f"{params[side]:,}" if side in params else "–" for side in ("old", "new"))
        better = "more" if line["higher_is_better"] else "less"
        rows.append(f"| {_title(line)} | {old} | {new} | {median} | {low} to {high} | {better} |")
    return "\n".join(rows)


def _under(line: dict[str, Any]) -> str:
    return str(line.get("params", {}).get("under", ""))


def _title(line: dict[str, Any]) -> str:
    """The name, with what tells lines of one name apart."""
    params = line.get("params", {})
    beside = [f"under {params['under']}"] if "under" in params else []
    beside += [f"n = {params['n']:,}"] if "n" in params else []
    return ", ".join([line["name"], *beside])


def disk_directory() -> str:
    """Where temporary files go that are to be on a disk."""
    places = [tempfile.gettempdir(), "/var/tmp", str(Path(__file__).parent)]
    return next((place for place in places if os.access(place, os.W_OK) and filesystem(place) not in _IN_MEMORY), ".")


def filesystem(path: str) -> str:
    """The kind of the file system that a path is on, as far as Linux tells."""
    path = os.path.realpath(path)
    best, kind = "", "unknown"
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return kind
    for line in mounts.splitlines():
        _, place, found, *_ = line.split()
        place = place.replace("\\040", " ")
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, found
    return kind


def _say(text: str) -> None:
    print(f"benchmarks: {text}", file=sys.stderr, flush=True)
