"""A Spark session in which topics are tables."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from headrace.client.connection.addresses import default_address
from headrace.model.errors import InvalidArgument
from headrace.spark.errors import SparkMissing
from headrace.spark.local_python import choose_python, on_loopback
from headrace.spark.pipelines.sessions import (
    LOCAL,
    checked_master,
    is_connect,
    local_cores,
    need_spark,
    session_settings,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.sql.tables import Tables

_JAVA_MIN = 17
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_VERSION = re.compile(r'(?:JAVA_VERSION=| version )"(?:1\.)?(\d+)')


def session(
    address: str | None = None,
    *,
    path: str | None = None,
    master: str | None = None,
    app_name: str = "headrace",
    tables: "Tables" = True,
    value_format: str = "string",
    conf: Mapping[str, str] | None = None,
) -> "SparkSession":
    """Return a Spark session with topics as temporary views; the active session if there is one.

    Every topic is a table of its name: `spark.sql("select count(*) from orders")`. Put names with characters other than
    letters, digits and `_` in backquotes. Keys and values are text.

    Parameters:
        address: the broker's address; by default $HEADRACE_URL, or else this machine. For a broker with security it
            names the file with the token, `headrace://host?token_file=/etc/headrace/token`, which is on the driver and
            on every executor; or $HEADRACE_TOKEN_FILE or $HEADRACE_TOKEN does, set for all of them.
        path: or a data directory, to be read without a broker.
        master: where Spark runs: `local[*]` by default, `spark://host:7077`, `sc://host:15002` for Spark Connect.
        app_name: the name of the Spark application.
        tables: which topics are tables: True for all but Headrace's own, False for none, names, patterns, or a dict of
            these with options of the source, as `{"*": {}, "orders": {"value.format": "json"}}`.
        value_format: how values are decoded by default: string, json (with the fields of a sample) or bytes.
        conf: settings of Spark.

    Returns:
        The session.

    Raises:
        SparkMissing: if PySpark, pyarrow or Java is not installed.
        ConnectionFailed: if the broker cannot be reached.
        InvalidArgument: if an argument is wrong.

    Example:
        >>> spark = headrace.spark.session("headrace://127.0.0.1:7390")  # doctest: +SKIP
        >>> spark.sql("select count(*) from orders").show()  # doctest: +SKIP
    """
    need_spark(master or LOCAL)
    from pyspark.sql import SparkSession

    from headrace.spark.sql.tables import register

    spark = SparkSession.getActiveSession()
    if spark is None:
        spark = _start_session(checked_master(master or LOCAL), app_name, conf or {})
    else:
        _apply(spark, {_PUSHDOWN: "true", **(conf or {})})
    address = address or (None if path else default_address())
    register(spark, address, path=path, tables=tables, value_format=value_format)
    return spark


@contextmanager
def temporary_settings(spark: "SparkSession", settings: Mapping[str, str]) -> Iterator[None]:
    """Set settings of a session, and restore the old ones at the end of the block."""
    before = {name: spark.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


def need_java(master: str) -> None:
    """Raise SparkMissing unless a Java that Spark supports is installed; does not start Java if possible."""
    need_spark(master)
    if is_connect(master):
        return
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(os.path.join(home, "bin", "java") if home else "java")
    version = None if java is None else java_version(java)
    if version is not None and version < _JAVA_MIN:
        raise SparkMissing(
            f"Spark needs Java {_JAVA_MIN} or later, and {java} is Java {version}: install openjdk-17-jre-headless "
            "(Debian, Ubuntu), and set JAVA_HOME if there are several"
        )


def java_version(java: str) -> int | None:
    """Return the major version of a Java, from its release file or `java -version`; None if unknown."""
    release = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(java))), "release")
    try:
        with open(release, encoding="utf-8", errors="replace") as file:
            found = _VERSION.search(file.read())
    except OSError:
        found = None
    if found is None:
        try:
            said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = _VERSION.search(said.stderr)
    return None if found is None else int(found[1])


def _start_session(master: str, app_name: str, conf: Mapping[str, str]) -> "SparkSession":
    need_java(master)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    builder = builder.remote(master) if is_connect(master) else builder.master(master)
    if local_cores(master) is not None:
        choose_python(preloaded=True)
    try:
        settings = session_settings(app_name, master, conf, quick=False, quiet=False)
        with on_loopback() if local_cores(master) is not None else nullcontext():
            return builder.config(map=settings).getOrCreate()  # type: ignore[no-any-return]
    except PySparkException as error:
        if error.getCondition() == "JAVA_GATEWAY_EXITED":
            raise SparkMissing(
                "Java exited before Spark started; its output is above. Spark needs Java 17 or later"
            ) from error
        raise InvalidArgument(f"Spark could not start: {error}") from error


def _apply(spark: "SparkSession", settings: Mapping[str, str]) -> None:
    from pyspark.errors import PySparkException

    for name, value in settings.items():
        try:
            spark.conf.set(name, value)
        except PySparkException as error:
            raise InvalidArgument(
                f"{name} cannot be set in the active session: stop that session first, or leave the setting out"
            ) from error
