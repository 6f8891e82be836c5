"""`headrace repair`: repairs a broker's data directory."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import add_json
from headrace.cli.commands.verify import add_data, log_content, log_lines
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, ProgressLine, counted
from headrace.server import data_bytes, repair_data

if TYPE_CHECKING:
    from headrace.server import Repaired

_EPILOG = """\
example:
  headrace repair ./data

For a data directory that a broker refuses, or in which `headrace verify` found
damage. No broker may be running on it. Topics, their settings and partitions are
restored from the intact parts of the journal and from the partitions' own metadata;
groups, leased subscriptions and schedules from the journal alone, as of its last
intact part. Every readable message keeps its offset.

Nothing is deleted: damaged, foreign and unknown files are moved or copied to the
directory set-aside, damaged messages to the directory quarantine of their log. The
command reports what it could not restore. It may be interrupted and run again.

Exit code: 0 repaired, or nothing to repair; 1 could not be repaired.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace repair`."""
    parser.epilog = _EPILOG
    parser.set_defaults(run=repair)
    add_data(parser)
    add_json(parser)


def repair(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Repair a data directory and print what was done."""
    with ProgressLine("repairing", data_bytes(given.data)) as progress:
        done = repair_data(given.data, progress)
    content = {
        "path": done.path,
        "changed": done.changed,
        "identity": done.identity,
        "problems": msgspec.to_builtins(done.problems),
        "set_aside": msgspec.to_builtins(done.set_aside),
        "topics": done.topics,
        "topics_found": done.topics_found,
        "settings_found": done.settings_found,
        "groups": done.groups,
        "subscriptions": done.subscriptions,
        "schedules": done.schedules,
        "not_restored": done.not_restored,
        "damaged_logs": [log_content(log) for log in done.logs if not log.sound],
    }
    out.tell(content, *_lines(done))
    return 0 if not any(log.error for log in done.logs) else 1


def _lines(done: "Repaired") -> Iterator[str]:
    yield f"{done.path}: {counted(len(done.logs), 'log')} checked"
    yield from (f"found: {one.path}: {one.problem}" for one in done.problems)
    yield from (f"set aside: {one.path}: {one.problem}" for one in done.set_aside)
    for log in done.logs:
        yield from log_lines(log)
    if done.problems:
        yield (
            f"restored: {counted(len(done.topics), 'topic')}, {counted(done.groups, 'group')}, "
            f"{counted(done.subscriptions, 'leased subscription')}, {counted(done.schedules, 'schedule')}"
        )
    yield from (f"  from its partitions: {name}" for name in done.topics_found)
    yield from (f"  with settings from its partitions: {name}" for name in done.settings_found)
    yield from (f"not restored: {text}" for text in done.not_restored)
    failed = any(log.error for log in done.logs)
    yield "NOT repaired" if failed else "repaired" if done.changed else "nothing to repair"
