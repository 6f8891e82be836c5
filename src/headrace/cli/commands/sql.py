"""`headrace sql`: runs SQL queries over topics on Spark, once or continuously."""

import argparse
import logging
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from difflib import get_close_matches
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import completes, count, duration, start
from headrace.cli.connection import add_connection, broker_url, connected
from headrace.cli.spark.sql_parser import in_need_of_quotes, named_columns, named_topics, statements
from headrace.cli.spark.sql_rows import CsvRows, JsonRows, Printer, TableRows
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import EXIT_USAGE, Output, ProgressLine, counted, say
from headrace.model.errors import HeadraceError, InvalidArgument

if TYPE_CHECKING:
    from headrace.spark.sql.statements import Frame, Session

_TABLE_ROWS = 1000
"""The default limit of rows in a table."""
_LOOK_EVERY_S = 0.25
_TRIGGER_S = 1.0
_CORRUPT = "_corrupt"
"""The column with values that do not match the schema; read together with the value."""
_CHEAPEST = "offset"
"""The column to read if the query needs none."""
_FORMATS = ("auto", "string", "json", "bytes")
_NO_TABLE = re.compile(r"^The table or view (`.*`) cannot be found")
_OF_TOPIC = re.compile(r"""([^=,:<'"()]+)=(.*)""", re.DOTALL)
"""The topic before the first `=`, unless the text before it is part of a schema."""

_EPILOG = """\
examples:
  headrace sql "select key, count(*) from orders group by key"
  headrace sql "select value.city, sum(value.total) from orders group by 1" --csv
  headrace sql "select * from orders where timestamp > now() - interval 1 hour"
  headrace sql 'select * from `eu.orders` limit 10' --json
  headrace sql "describe orders"
  headrace sql -f report.sql --parquet ./report
  headrace sql "select value.level, count(*) from logs group by 1" --follow

Every topic is a table with the columns topic, partition, offset, timestamp, key
and value. Write names with characters other than letters, digits and _ in
`backquotes`.

Keys are text. Values are JSON if all sampled values, the oldest and the newest,
are JSON objects: then value.NAME is a field, and values that do not match are in
the column _corrupt. Otherwise values are text. --format overrides this, for all
topics or with TOPIC= for one, and --schema defines the fields:
  --format logs=string --schema 'orders=id bigint, total decimal(10,2)'

With --follow the query runs continuously and prints rows as they arrive: those of
messages published from now on, or since --from. A query with GROUP BY prints rows
again when they change; with ORDER BY as well, it prints all rows again. Ends with
Ctrl-C, SIGTERM, --limit, and when its output is closed.

A table has at most 1,000 rows; --limit changes that. In CSV, NULL is an empty field
and empty text is "". In JSON, a repeated column name gets a number: key, key_2.
Results that are too large to be sorted in 1 GB need
--conf spark.driver.memory=4g.

Needs Spark and Java: see `bin/setup spark`. Times are UTC.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace sql`."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("statement", metavar="SQL", nargs="?", help="the query; - reads it from stdin")
    completes(add("-f", "--file", metavar="FILE", help="read statements from a file; ; ends each"), "file")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV with a heading")
    completes(form.add_argument("--parquet", metavar="OUT", help="write Parquet files to this directory"), "directory")
    add("--overwrite", action="store_true", help="with --parquet: replace existing files")
    add("-n", "--limit", metavar="N", type=count, help="end after this many rows")
    add(
        "--from",
        dest="start",
        metavar="WHERE",
        type=_start,
        help="the first message: earliest, latest or a time",
    )
    add("--follow", action="store_true", help="run continuously, and print rows as they arrive")
    add("--trigger", metavar="TIME", type=duration, help="with --follow: the time between batches (default: 1s)")
    values = parser.add_argument_group("values")
    values.add_argument(
        "--format", dest="formats", metavar="[TOPIC=]FORMAT", action="append", default=[], help=", ".join(_FORMATS)
    )
    values.add_argument(
        "--schema",
        dest="schemas",
        metavar="[TOPIC=]FIELDS",
        action="append",
        default=[],
        help="the fields of JSON values",
    )
    add_connection(parser, json_in=form)
    where = parser.add_argument_group("Spark")
    completes(where.add_argument("--data", metavar="PATH", help="read a data directory, without a broker"), "directory")
    where.add_argument("--master", default="local[*]", help="the Spark master (default: local[*])")
    where.add_argument(
        "--conf", metavar="NAME=VALUE", action="append", default=[], help="a Spark setting; may be repeated"
    )
    parser.set_defaults(run=sql, check=_check)


def _start(text: str) -> int | str | datetime:
    """Parse the start of all partitions; `_check` refuses an offset, which applies to one partition."""
    try:
        return start(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no position in a topic; give earliest, latest, a time like 2026-01-31, or '5m ago'"
        ) from None


def _check(given: argparse.Namespace) -> str | None:
    """Return why the arguments contradict each other, if they do."""
    if (given.statement is None) == (given.file is None):
        return "give SQL, or -f FILE"
    if given.parquet and not given.overwrite and os.path.exists(given.parquet):
        return _in_use(given.parquet)
    if given.overwrite and not given.parquet:
        return "--overwrite needs --parquet"
    if given.trigger is not None and not given.follow:
        return "--trigger needs --follow"
    if given.follow and given.parquet:
        return "--follow prints rows; to write them to files continuously, use headrace pipeline"
    if given.data is not None and given.connect is not None:
        return "give --connect or --data, not both"
    if isinstance(given.start, int):
        return "--from is for all partitions: give earliest, latest or a time, and offsets in the query"
    for text in given.formats:
        if _own(text)[1] not in _FORMATS:
            return f"{text!r} is no format; there are {', '.join(_FORMATS)}, or TOPIC= and one of them"
    if any("=" not in setting for setting in given.conf):
        return "--conf takes NAME=VALUE"
    return None


def sql(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Run a query, and print its result."""
    from headrace.spark.errors import SparkMissing
    from headrace.spark.pipelines.sessions import need_spark

    warnings.filterwarnings("ignore", module=r"pyspark\b")
    try:
        need_spark(given.master)
        from headrace.spark.errors import InvalidStatement, PathInUse
    except SparkMissing as error:
        return _wrong_usage(error, out)
    try:
        with _notes(out):
            return _Sql(given, out, interrupts).run()
    except (SparkMissing, InvalidStatement, PathInUse) as error:
        return _wrong_usage(error, out)


def _wrong_usage(error: HeadraceError, out: Output) -> int:
    content = {"error": {"code": error.code, "message": str(error), "retryable": False}}
    say(content, f"headrace: {error} [{error.code}]", as_json=out.json)
    return EXIT_USAGE


class _Sql:
    """One run of the command."""

    def __init__(self, given: argparse.Namespace, out: Output, interrupts: Interrupts) -> None:
        self._given = given
        self._out = out
        self._interrupts = interrupts
        self._statements = statements(_text(given, interrupts))
        if not self._statements:
            raise InvalidArgument("there is no SQL")
        self._place: dict[str, str] = {"path": given.data} if given.data else {"address": broker_url(given)}
        self._topics: list[str] = []

    def run(self) -> int:
        """Start Spark, run the statements, and stop it."""
        with ProgressLine("starting Spark") as progress, self._session() as spark:
            *before, last = self._statements
            frame: Frame | None = None
            for statement in before:
                frame = self._asked(spark, statement)
                if frame.columns:
                    self._print(frame, progress)
            frame = self._asked(spark, last)
            progress(0)
            if self._given.follow:
                return self._follow(frame, progress)
            if self._given.parquet:
                self._write(frame)
            elif frame.columns:
                self._print(frame, progress)
        return 0

    @contextmanager
    def _session(self) -> Iterator["Session"]:
        """Start Spark with the named topics as tables; samples their values while Java starts."""
        from headrace.spark.ephemeral_session import EphemeralSession

        conf = dict(setting.split("=", 1) for setting in self._given.conf)
        if self._given.parquet and _is_url(self._given.parquet):
            # Hadoop's file systems for object stores buffer data in this directory.
            conf.setdefault("spark.hadoop.fs.file.impl", "org.apache.hadoop.fs.LocalFileSystem")
        quick = EphemeralSession(self._given.master, conf)
        starting = _Aside(quick.begin)
        try:
            self._topics, tables = self._tables()
            spark: Session = starting.result()
            self._register(spark, tables)
            yield spark
        finally:
            quick.end()

    def _tables(self) -> tuple[list[str], dict[str, dict[str, str]]]:
        from headrace.spark.source.options import DEFAULT_COLUMNS, MORE_COLUMNS

        topics, text = self._all_topics(), ";".join(self._statements)
        columns = named_columns(text, (*DEFAULT_COLUMNS, *MORE_COLUMNS, _CORRUPT))
        tables: dict[str, dict[str, str]] = {}
        for name in named_topics(text, topics):
            own: dict[str, str] = {}
            if columns is not None:
                # Spark would read and decode all columns, and then drop those that the query does not need.
                own["columns"] = ",".join(columns).replace(_CORRUPT, "value") or _CHEAPEST
            for option, given in (("value.format", self._given.formats), ("value.schema", self._given.schemas)):
                for topic, said in map(_own, given):
                    if topic in (None, name):
                        own[option] = said
            tables[name] = own
        return topics, tables

    def _all_topics(self) -> list[str]:
        if self._given.data:
            from headrace.spark.sql.tables import topic_names

            return topic_names(path=self._given.data)
        with connected(self._given, self._out) as bus:
            return sorted(info.topic for info in bus.topics())

    def _register(self, spark: "Session", tables: dict[str, dict[str, str]]) -> None:
        from headrace.spark.sql.statements import translate_errors
        from headrace.spark.sql.tables import AUTO, register

        options: dict[str, Any] = {"timeout": self._given.timeout}
        if isinstance(self._given.start, str):
            options["startingOffsets"] = self._given.start
        elif self._given.start is not None:
            options["startingTimestamp"] = round(self._given.start.timestamp() * 1000)
        with translate_errors():
            register(spark, **self._place, tables=tables, value_format=AUTO, stream=self._given.follow, options=options)

    def _asked(self, spark: "Session", statement: str) -> "Frame":
        from headrace.spark.errors import InvalidStatement
        from headrace.spark.sql.statements import ask

        try:
            return ask(spark, statement)
        except InvalidStatement as error:
            hint = self._hint(statement, str(error))
            if not hint:
                raise
            raise InvalidStatement(f"{error}; {hint}") from error

    def _hint(self, statement: str, problem: str) -> str:
        """Suggest a topic that the user may have meant."""
        unquoted = in_need_of_quotes(statement, self._topics)
        if unquoted:
            return f"write the topic's name as `{unquoted[0]}`"
        missing = _NO_TABLE.search(problem)
        if missing is None:
            return ""
        near = get_close_matches(missing[1].replace("`", ""), self._topics, 1)
        return f"is the topic {near[0]} meant?" if near else "headrace topic list shows the topics"

    def _print(self, frame: "Frame", progress: ProgressLine) -> None:
        from headrace.spark.sql.statements import rows_of

        printer = self._printer()
        limit = self._given.limit
        if limit is None and isinstance(printer, TableRows):
            limit = _TABLE_ROWS
        # One more row shows whether there are more.
        names, rows = rows_of(frame, None if limit is None else limit + 1)
        first = list(islice(rows, min(limit, 1) if limit is not None else 1))
        progress.clear()
        printer.print(names, islice(chain(first, rows), limit))
        more = limit is not None and next(rows, None) is not None
        printer.close(more)
        if more and self._given.limit is None:
            self._out.note(f"there are more rows than {limit:,}; --limit shows more")

    def _write(self, frame: "Frame") -> None:
        from headrace.spark.errors import PathInUse
        from headrace.spark.sql.statements import write_parquet

        given = self._given
        path = given.parquet if _is_url(given.parquet) else os.path.abspath(given.parquet)
        try:
            written = write_parquet(frame, path, given.limit, overwrite=given.overwrite)
        except PathInUse as error:
            raise PathInUse(_in_use(given.parquet)) from error
        self._out.tell(
            {"rows": written, "path": given.parquet}, f"{counted(written, 'row')} written to {given.parquet}"
        )

    def _follow(self, frame: "Frame", progress: ProgressLine) -> int:
        from headrace.spark.sql.statements import Rows, follow

        printer = self._printer()
        done = threading.Event()

        def on_rows(found: Rows, whole: bool) -> None:
            if done.is_set():
                return
            left = None if self._given.limit is None or whole else self._given.limit - printer.count
            progress.clear()
            try:
                printer.print(found.names, islice(found.rows, left), whole)
            except BrokenPipeError:  # the reader of our output has closed the pipe
                done.set()
            if self._given.limit is not None and printer.count >= self._given.limit:
                done.set()

        # A signal must not interrupt a call to Java: the connection would be unusable afterwards.
        with (
            self._interrupts.held(once=True),
            tempfile.TemporaryDirectory(prefix="headrace-sql-", ignore_cleanup_errors=True) as checkpoint,
        ):
            following = follow(frame, self._given.trigger or _TRIGGER_S, checkpoint, on_rows)
            try:
                while not done.is_set() and not self._out.closed and not following.wait(_LOOK_EVERY_S):
                    self._interrupts.check()
            finally:
                done.set()
                with suppress(HeadraceError):
                    following.stop()
        self._interrupts.check()
        return 0

    def _printer(self) -> Printer:
        if self._given.json:
            return JsonRows(self._out)
        return CsvRows(self._out) if self._given.csv else TableRows(self._out)


def _is_url(path: str) -> bool:
    return "://" in path


def _in_use(path: str) -> str:
    return f"{path} is there already: give --overwrite to replace it, or another path"


class _Aside:
    """A call that runs in a thread of its own."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._found: Any = None
        self._error: BaseException | None = None
        # PySpark replaces signal handlers only in the main thread; a daemon thread does not delay the exit.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> Any:
        """Return the result of the call, or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._work()
        except BaseException as error:  # noqa: BLE001  # raised where the result is asked for
            self._error = error


class _Notes(logging.Handler):
    """Prints log messages to stderr."""

    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it."""
        self._out.note(record.getMessage())


@contextmanager
def _notes(out: Output) -> Iterator[None]:
    logger, notes = logging.getLogger("headrace.spark"), _Notes(out)
    logger.addHandler(notes)
    try:
        yield
    finally:
        logger.removeHandler(notes)


def _own(text: str) -> tuple[str | None, str]:
    """Parse a setting of one topic, or of all: (None, ...)."""
    found = _OF_TOPIC.fullmatch(text)
    return (found[1], found[2]) if found else (None, text)


def _text(given: argparse.Namespace, interrupts: Interrupts) -> str:
    if given.file is not None and given.file != "-":
        with open(given.file, encoding="utf-8") as file:
            return file.read()
    if given.file is None and given.statement != "-":
        return str(given.statement)
    if sys.stdin is None:
        raise InvalidArgument("stdin is closed; give SQL, or -f FILE")
    with interrupts.released():
        return sys.stdin.read()
