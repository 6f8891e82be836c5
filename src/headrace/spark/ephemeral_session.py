"""A Spark session for one command: starts quickly, logs nothing, and ends with the command."""

import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from headrace.model.errors import InvalidArgument
from headrace.spark.errors import SparkMissing
from headrace.spark.local_python import choose_python, on_loopback
from headrace.spark.pipelines.sessions import checked_master, is_connect, local_cores, session_settings
from headrace.spark.sessions import need_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto -XX:-UsePerfData"
"""JVM options for a process that lives for seconds: quick compilation, few threads."""
_SETTINGS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.forceDeleteTempCheckpointLocation": "true",
    "spark.sql.streaming.stopTimeout": "10s",
}
_LOCAL = {
    "spark.driver.extraJavaOptions": _JAVA,
}
_TOLD_LINES = 15
_END_S = 20.0


class EphemeralSession:
    """Starts and ends a session; Java's output goes to a temporary file, shown only on failure.

    In a process with an active session, that session is used.
    """

    def __init__(self, master: str, conf: Mapping[str, str]) -> None:
        from pyspark.sql import SparkSession

        self._master = checked_master(master)
        self._conf = conf
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._log: Any = None
        self._process: Any = None
        self._borrowed = SparkSession.getActiveSession()
        self._session: SparkSession | None = None

    def begin(self) -> "SparkSession":
        """Start the session; raises SparkMissing or InvalidArgument with the reason."""
        if self._borrowed is not None:
            return self._borrowed
        need_java(self._master)
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        os.environ["TZ"] = "UTC"  # PySpark converts times to the zone of its process, not to Spark's
        time.tzset()
        builder: Any = SparkSession.builder
        try:
            if is_connect(self._master):
                builder = builder.remote(self._master).config(map=dict(self._conf))
            else:
                self._begin_context()
            self._session = builder.getOrCreate()
        except PySparkException as error:
            if error.getCondition() == "JAVA_GATEWAY_EXITED":
                raise SparkMissing(f"Java exited before Spark started{self._java_output()}") from error
            raise InvalidArgument(f"Spark could not start: {error}") from error
        assert self._session is not None
        return self._session

    def end(self) -> None:
        """End the session and its Java process."""
        if self._process is None:
            if self._session is not None:
                self._session.stop()
            return
        logging.getLogger().addFilter(_not_of_py4j)
        self._process.stdin.close()  # Java then shuts down and cleans up
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()
        self._log.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _begin_context(self) -> None:
        from pyspark import SparkConf, SparkContext
        from pyspark.java_gateway import launch_gateway

        settings = session_settings("headrace sql", self._master, {}, quick=True, quiet=True) | _SETTINGS
        if local_cores(self._master) is not None:
            settings |= _LOCAL
            choose_python()
            self._scratch = tempfile.TemporaryDirectory(prefix="headrace-spark-", ignore_cleanup_errors=True)
            settings |= {
                name: f"{self._scratch.name}/{name}" for name in ("spark.local.dir", "spark.sql.warehouse.dir")
            }
        conf = SparkConf().setMaster(self._master).setAll(list({**settings, **self._conf}.items()))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed when Java has ended
        launch: Any = launch_gateway
        with on_loopback() if local_cores(self._master) is not None else nullcontext():
            gateway = launch(conf, {"stdout": self._log, "stderr": self._log})
        self._process = gateway.proc
        SparkContext(conf=conf, gateway=gateway)

    def _java_output(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()[-_TOLD_LINES:]
        return ":\n  " + "\n  ".join(lines) if lines else ""


def _not_of_py4j(record: logging.LogRecord) -> bool:
    """Filter out py4j's errors about releasing Java objects after Java has ended."""
    return "/py4j/" not in record.pathname
