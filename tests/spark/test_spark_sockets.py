"""Nothing that is started on this machine listens where others could connect."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.known import ENVIRONMENT
from tests.spark.conftest import SparkBroker, java_problem
from tests.spark.listening import elsewhere, family, listening

SESSION = """
import sys
from headrace.spark import session

spark = session(sys.argv[1], master="local[2]", tables=False, conf={"spark.ui.enabled": sys.argv[3]})
rates = spark.readStream.format("rate").load()
query = rates.writeStream.foreachBatch(lambda batch, number: batch.collect()).start()
while not query.lastProgress:
    query.processAllAvailable()
print(spark.sparkContext.uiWebUrl, flush=True)
sys.stdin.read()
"""
DRIVER = """
import os, sys
from headrace.spark.pipelines.sessions import open_session, session_settings

lock = os.open(sys.argv[2], os.O_CREAT | os.O_RDWR)
settings = session_settings("driver", "local[2]", {}, quick=False, quiet=True)
spark = open_session("local[2]", settings, lock_fd=lock, folder=os.path.dirname(sys.argv[2]))
print(spark.sparkContext.uiWebUrl, flush=True)
sys.stdin.read()
"""
QUICK = """
import sys
from headrace.spark.ephemeral_session import QuickSession

spark = QuickSession("local[2]", {}).begin()
print(spark.sparkContext.uiWebUrl, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("program", "ui"),
    [
        pytest.param(SESSION, "true", id="session"),
        pytest.param(DRIVER, "false", id="driver", marks=pytest.mark.long),
        pytest.param(QUICK, "false", id="command", marks=pytest.mark.long),
    ],
)
def test_a_local_spark_listens_on_loopback_only(
    broker: SparkBroker, quickly: dict[str, str], tmp_path: Path, program: str, ui: str
) -> None:
    if problem := java_problem():
        pytest.skip(problem)
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "SPARK_LOCAL_IP"}
    started = subprocess.Popen(
        [sys.executable, "-c", program, broker.address, str(tmp_path / "lock"), ui],
        env={**environment, **quickly},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdin is not None
    assert started.stdout is not None
    with started:
        try:
            said = started.stdout.readline().strip()
            found = listening(family(started.pid))
        finally:
            started.stdin.close()
    assert (said == "None") == (ui == "false"), said
    assert found, "Java listens for Python at least"
    assert not elsewhere(found)
    assert started.returncode == 0
