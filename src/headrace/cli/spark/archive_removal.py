"""`headrace archive expire` and `delete`: remove archived messages."""

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from headrace.cli.arguments import Command, CommandParser, completes, duration_from_zero, size
from headrace.cli.connection import add_connection, add_yes, broker_url, confirmed
from headrace.cli.setting_options import bytes_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import EXIT_ERROR, Output, ProgressLine, counted

if TYPE_CHECKING:
    from headrace.spark.archive.expirer import Expirer, Removal

_EXPIRE = """\
examples:
  headrace archive expire orders --older-than 365d
  headrace archive expire orders clicks --keep-bytes 500GB --dry-run

Removes archived files, the oldest of each partition first: those that have only
messages older than --older-than, and then more until what is left is not larger
than --keep-bytes. From then on, reads of the topic through Spark begin after them.
A read that was planned before fails with an error if it still needs them.

The command first removes the files from the manifest, then deletes them: after an
interruption, run it again. Needs no Java.
"""

_DELETE = """\
examples:
  headrace archive delete orders --dry-run
  headrace archive delete orders --yes

Deletes the archive of a topic. Messages that were dropped from the log when they
were archived are lost; the topic and its log do not change. --archive selects the
archive of an earlier topic with the same name.

The command first empties the manifest, then deletes the files: after an
interruption, run it again. Needs no Java.
"""


def add_commands(make: Callable[[str, Command, str, str], CommandParser]) -> None:
    """Add `expire` and `delete` to the commands of `headrace archive`."""
    parser = make("expire", expire, "remove archived files by age or total size", _EXPIRE)
    completes(parser.add_argument("topics", metavar="TOPIC", nargs="+", help="whose archive"), "topic")
    add = parser.add_argument
    add("--older-than", metavar="TIME", type=duration_from_zero, help="remove files whose messages are all older")
    add("--keep-bytes", metavar="SIZE", type=size, help="remove the oldest files until the rest is not larger")
    _add_common(parser)
    parser.set_defaults(check=_check_expire)
    parser = make("delete", delete, "delete the archive of a topic", _DELETE)
    completes(parser.add_argument("topic", metavar="TOPIC", help="whose archive"), "topic")
    parser.add_argument(
        "--archive", metavar="ID", default="", help="the id of the topic, if several topics had this name"
    )
    add_yes(parser)
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    add_connection(parser)


def _check_expire(given: argparse.Namespace) -> str | None:
    """Return why the arguments are incomplete, if they are."""
    if given.older_than is None and given.keep_bytes is None:
        return "give --older-than, --keep-bytes, or both"
    return None


def expire(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Remove archived files by age or total size."""
    from headrace.spark.archive.bounds import bound_us

    before_us = None if given.older_than is None else bound_us(given.older_than)
    for topic in dict.fromkeys(given.topics):

        def work(expirer: "Expirer", progress: ProgressLine) -> None:
            expired = expirer.plan(before_us, given.keep_bytes)
            removal = expirer.removal(expired)
            if not given.dry_run:
                expirer.expire(expired)
            _tell(given, out, progress, removal)

        _with_expirer(given, topic, "", interrupts, work)
    return 0


def delete(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Delete the archive of a topic."""
    done = True

    def work(expirer: "Expirer", progress: ProgressLine) -> None:
        nonlocal done
        removal = expirer.removal(expirer.plan_all())
        progress.clear()
        question = (
            f"Delete the archive of {given.topic}: {counted(removal.messages, 'message')} in "
            f"{counted(removal.files, 'file')}, {bytes_text(removal.bytes)}? This cannot be undone."
        )
        done = given.dry_run or confirmed(given, question)
        if not done:
            out.note("nothing was removed")
            return
        if not given.dry_run:
            expirer.delete()
        _tell(given, out, progress, removal)

    _with_expirer(given, given.topic, given.archive, interrupts, work)
    return 0 if done else EXIT_ERROR


def _with_expirer(
    given: argparse.Namespace,
    topic: str,
    archive_id: str,
    interrupts: Interrupts,
    work: Callable[["Expirer", ProgressLine], None],
) -> None:
    from headrace.spark.errors import SparkMissing

    if importlib.util.find_spec("pyarrow") is None:
        raise SparkMissing("pyarrow, which reaches archives, is not installed: pip install 'headrace[spark]'")
    from headrace.spark.archive.expirer import Expirer
    from headrace.spark.source.message_source import BrokerSource

    origin = BrokerSource(broker_url(given), given.timeout)
    try:
        with ProgressLine(f"{topic}: removing files") as progress:

            def on_step(_step: str, files: int) -> None:
                interrupts.check()
                progress(files)

            work(Expirer(origin, topic, archive_id, on_step), progress)
    finally:
        origin.close()


def _tell(given: argparse.Namespace, out: Output, progress: ProgressLine, removal: "Removal") -> None:
    progress.clear()
    what = f"{counted(removal.messages, 'message')} in {counted(removal.files, 'file')}, {bytes_text(removal.bytes)}"
    left = f"{counted(removal.messages_left, 'message')}, {bytes_text(removal.bytes_left)}"
    done = "would be removed" if given.dry_run else "removed"
    stays = "would be left" if given.dry_run else "left"
    out.tell({**asdict(removal), "dry_run": given.dry_run}, f"{removal.topic}: {what} {done}; {left} {stays}")
