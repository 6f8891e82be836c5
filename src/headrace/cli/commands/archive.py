"""`headrace archive`: archive old messages in Parquet files, list archives, and restore messages."""

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import command_maker, completes, duration_from_zero, start
from headrace.cli.connection import add_connection, add_yes, broker_url, confirmed
from headrace.cli.message_formats import time_text
from headrace.cli.setting_options import bytes_text
from headrace.cli.spark import archive_removal
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import EXIT_ERROR, EXIT_USAGE, Output, ProgressLine, counted, say, table
from headrace.model.errors import HeadraceError, InvalidArgument, TopicNotFound

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.archive.archiver import Archiver, ArchiveResult
    from headrace.spark.archive.status import TopicStatus

_WEEK_S = 7 * 86400.0

_RUN = """\
examples:
  headrace archive run orders --to /srv/archive
  headrace archive run --all --to s3://company/archive --older-than 30d
  headrace archive run orders --to /srv/archive --older-than 1d --keep
  headrace archive run orders --to 's3://company/archive?endpoint_override=minio:9000&scheme=http'

Copies messages older than --older-than, up to the first younger one, to Parquet
files at a path or URL, compares the files with the log, and then tells the broker
to drop the messages. Messages that groups or leased subscriptions have not read
stay in the log. Reads of the topic through Spark include the archived files.

URLs are s3 (also written s3a), gs, abfs and hdfs ones; no jar is needed. S3
credentials are read from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and the
address of another S3 server from AWS_ENDPOINT_URL, or endpoint_override in the URL.

A run that is interrupted at any point can be started again. Needs Spark and Java:
see `bin/setup spark`. Topics in memory, topics compacted by key and system topics
(headrace.*) cannot be archived.
"""

_STATUS = """\
examples:
  headrace archive status
  headrace archive status orders --json

Messages that could be archived now are older than --older-than and not archived.
"""

_RESTORE = """\
examples:
  headrace archive restore orders --to orders.again
  headrace archive restore orders --to orders.march --from 2026-03-01 --until 2026-04-01
  headrace archive restore orders --url /srv/archive

Publishes archived messages to a topic, with their keys, headers and times, each
to the partition it was in, in order. The topic is created if it does not exist.
A repeated restore publishes the same files to a topic only once, within the seven
days for which a broker remembers them.

--from and --until take an offset, which applies to every partition, or a time.
With --url the archive is read from its files alone, for example when its broker is
lost. Needs Spark and Java: see `bin/setup spark`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace archive`."""
    parser.epilog = "`headrace archive COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    _add_run(make("run", run, "archive old messages of topics, and drop them from the log", _RUN))
    _add_status(make("status", status, "list archived messages, and those that could be archived", _STATUS))
    _add_restore(make("restore", restore, "publish archived messages again", _RESTORE))
    archive_removal.add_commands(make)


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_topics(parser)
    add = parser.add_argument
    add("--all", action="store_true", help="all topics that can be archived")
    completes(add("--to", metavar="URL", required=True, help="the path or URL of the archive"), "directory")
    _add_age(parser)
    add("--keep", action="store_true", help="do not drop archived messages from the log")
    add("--skip-damaged", action="store_true", help="skip messages that are damaged in the log")
    _add_spark(parser)
    add_connection(parser)
    parser.set_defaults(check=_check_run)


def _add_status(parser: argparse.ArgumentParser) -> None:
    _add_topics(parser)
    _add_age(parser)
    add_connection(parser)


def _add_restore(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    completes(add("topic", metavar="TOPIC", help="whose archive"), "topic")
    completes(add("--to", metavar="TOPIC", help="publish to this topic (default: the same)"), "topic")
    add("--from", dest="begin", metavar="WHERE", type=_offset_or_time, help="restore from this offset or time")
    add("--until", metavar="WHERE", type=_offset_or_time, help="restore messages before this offset or time")
    completes(
        add("--url", metavar="URL", help="read the archive at this path or URL, without asking the broker for it"),
        "directory",
    )
    add("--archive", metavar="ID", default="", help="the id of the topic, if several topics had this name")
    add_yes(parser)
    _add_spark(parser)
    add_connection(parser)


def _offset_or_time(text: str) -> int | datetime:
    """Parse the first or last offset or time of a restore."""
    try:
        found = start(text)
    except argparse.ArgumentTypeError:
        found = text
    if isinstance(found, str):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither an offset nor a time; give an offset, a time like 2026-01-31, or '5m ago'"
        )
    return found


def _add_topics(parser: argparse.ArgumentParser) -> None:
    completes(parser.add_argument("topics", metavar="TOPIC", nargs="*", help="the topic's name"), "topic")


def _add_age(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--older-than",
        metavar="TIME",
        type=duration_from_zero,
        default=_WEEK_S,
        help="the minimum age of messages (default: 7d)",
    )


def _add_spark(parser: argparse.ArgumentParser) -> None:
    spark = parser.add_argument_group("Spark")
    spark.add_argument("--master", default="local[*]", help="the Spark master (default: local[*])")
    spark.add_argument(
        "--conf", metavar="NAME=VALUE", action="append", default=[], help="a Spark setting; may be repeated"
    )


def _check_run(given: argparse.Namespace) -> str | None:
    """Return why the arguments contradict each other, if they do."""
    if given.all == bool(given.topics):
        return "give topics, or --all"
    return None


def run(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Archive topics."""

    def work(spark: "SparkSession", progress: ProgressLine) -> int:
        from headrace.spark.archive.archiver import Archiver, ArchiveRequest

        def on_step(_step: str, _topic: str) -> None:
            interrupts.check()

        request = ArchiveRequest(given.to, given.older_than, given.keep, given.skip_damaged, given.timeout)
        with Archiver(spark, broker_url(given), request, on_step) as archiver:
            return _run_each(given, out, archiver, progress)

    return _on_spark(given, out, interrupts, work)


def _run_each(given: argparse.Namespace, out: Output, archiver: "Archiver", progress: ProgressLine) -> int:
    topics = archiver.topics() if given.all else list(dict.fromkeys(given.topics))
    if not topics:
        out.note("there is no topic to archive")
    failed = 0
    for topic in topics:
        try:
            outcome = archiver.run(topic)
        except HeadraceError as error:
            if len(topics) == 1:
                raise
            failed += 1  # an error in one topic does not stop the others
            content = {
                "error": {"code": error.code, "message": str(error), "retryable": error.retryable, "topic": topic}
            }
            say(content, f"headrace: {topic}: {error} [{error.code}]", as_json=out.json)
            continue
        progress.clear()
        for note in outcome.notes:
            out.note(note)
        out.tell(_outcome_content(outcome), _outcome_text(outcome))
    return EXIT_ERROR if failed else 0


def _outcome_content(outcome: "ArchiveResult") -> dict[str, Any]:
    return {**asdict(outcome), "archived_to": {str(at): end for at, end in sorted(outcome.archived_to.items())}}


def _outcome_text(outcome: "ArchiveResult") -> str:
    done = "nothing more to archive"
    if outcome.files:
        files = f"{counted(outcome.files, 'file')}, {bytes_text(outcome.bytes)}"
        done = f"{counted(outcome.messages, 'message')} archived in {files}"
    dropped = f"; {counted(outcome.dropped, 'message')} dropped from the log" if outcome.dropped else ""
    return f"{outcome.topic}: {done}{dropped}"


def status(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print what is archived, by topic."""
    from headrace.spark.archive.status import archive_status
    from headrace.spark.source.message_source import BrokerSource

    origin = BrokerSource(broker_url(given), given.timeout)
    try:
        found = archive_status(origin, given.topics, given.older_than)
    finally:
        origin.close()
    if out.json:
        for each in found:
            out.tell({**asdict(each), "open": each.open})
        return 0
    if not found:
        out.note("there are no topics")
        return 0
    columns = ("topic", "archived messages", "files", "size", "until", "messages in the log", "could be archived")
    out.tell({}, *table(columns, *map(_row, found)))
    if given.topics:
        for each in found:
            out.tell({}, "", *_partitions(each))
    return 0


def _row(one: "TopicStatus") -> tuple[Any, ...]:
    until = "-" if one.archived_until_us is None else time_text(one.archived_until_us)
    name = f"{one.topic} (deleted, id {one.topic_id})" if one.deleted else one.topic
    in_log = sum(each.log_end - each.log_first for each in one.partitions)
    return name, one.messages, one.files, bytes_text(one.bytes), until, in_log, one.open


def _partitions(one: "TopicStatus") -> Iterator[str]:
    yield f"{one.topic}  {', '.join(one.urls) or 'not archived'}"
    columns = ("partition", "archived from", "archived to", "log from", "log to", "could be archived")
    rows = [
        (
            each.partition,
            "-" if each.archived_from is None else each.archived_from,
            "-" if each.archived_to is None else each.archived_to,
            each.log_first,
            each.log_end,
            each.open,
        )
        for each in one.partitions
    ]
    if rows:
        yield from table(columns, *rows)


def restore(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Publish archived messages again."""

    def work(spark: "SparkSession", progress: ProgressLine) -> int:
        from headrace.spark.archive.restorer import Restorer, archived_chunks, chosen_parts
        from headrace.spark.source.message_source import BrokerSource

        address = broker_url(given)
        origin = BrokerSource(address, given.timeout)
        target = given.to or given.topic
        try:
            chunks = archived_chunks(origin, given.topic, given.url or "", given.archive)
            parts = chosen_parts(chunks, given.begin, given.until)
            interrupts.check()
            done = Restorer(spark, origin, address, target).restore(chunks, parts)
        finally:
            origin.close()
        progress.clear()
        out.tell(asdict(done), f"{counted(done.messages, 'message')} of {given.topic} restored to {target}")
        return 0

    if not _sure(given, out):
        out.note("nothing was restored")
        return EXIT_ERROR
    return _on_spark(given, out, interrupts, work)


def _sure(given: argparse.Namespace, out: Output) -> bool:
    """Return whether the user confirms a restore to the same topic, where readers already find the messages."""
    from headrace.cli.connection import connected

    with connected(given, out) as bus:
        if given.to not in (None, given.topic):
            return True
        try:
            bus.describe_topic(given.topic)
        except TopicNotFound:
            return True
    return confirmed(given, f"Topic {given.topic} exists: its readers would get the archived messages twice. Restore?")


def _on_spark(given: argparse.Namespace, out: Output, interrupts: Interrupts, work: Any) -> int:
    """Call a function with a new Spark session; if Spark is missing, report what to install."""
    from headrace.spark.errors import SparkMissing

    try:
        with interrupts.held(once=True), ProgressLine("working") as progress, _session(given) as spark:
            interrupts.check()
            return int(work(spark, progress))
    except SparkMissing as error:
        content = {"error": {"code": error.code, "message": str(error), "retryable": False}}
        say(content, f"headrace: {error} [{error.code}]", as_json=out.json)
        return EXIT_USAGE


@contextmanager
def _session(given: argparse.Namespace) -> "Iterator[SparkSession]":
    from headrace.spark.ephemeral_session import EphemeralSession
    from headrace.spark.pipelines.sessions import need_spark

    if any("=" not in setting for setting in given.conf):
        raise InvalidArgument("--conf takes NAME=VALUE")
    need_spark(given.master)
    conf = {"spark.app.name": "headrace archive", **dict(setting.split("=", 1) for setting in given.conf)}
    session = EphemeralSession(given.master, conf)
    try:
        with ThreadPoolExecutor(1) as aside:  # PySpark replaces signal handlers only in the main thread
            spark = aside.submit(session.begin).result()
        try:
            yield spark
        finally:
            spark.stop()  # otherwise PySpark prints long errors when Java exits
    finally:
        session.end()
