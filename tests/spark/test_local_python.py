"""Spark's processes on this machine run the Python of the driver, and import pyspark as it is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.spark.local_python import choose_python

NAMES = ("PYSPARK_PYTHON", "HEADRACE_SPARK_PYTHON", "SPARK_HOME")


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)


def test_pyspark_is_the_installed_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import pyspark

    choose_python()
    home = Path(pyspark.__file__).parent
    archives = sorted(map(str, (home / "python" / "lib").glob("*.zip")))
    assert len(archives) == 2
    own = tmp_path / "a folder"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([archives[0], str(own), archives[1], str(tmp_path)]))
    program = (
        "import os, sys, pyspark, py4j; print(sys.executable, pyspark.__file__, os.environ['PYTHONPATH'], sep='\\n')"
    )
    said = subprocess.run([os.environ["PYSPARK_PYTHON"], "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [sys.executable, pyspark.__file__, f"{own}:{tmp_path}"]
    monkeypatch.setenv("PYTHONPATH", "")
    run = [os.environ["PYSPARK_PYTHON"], "-c", "import sys; sys.exit(3)"]
    assert subprocess.run(run, check=False).returncode == 3


def test_what_the_user_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "python3.11")
    choose_python()
    assert os.environ["PYSPARK_PYTHON"] == "python3.11"


def test_a_spark_of_the_users_own_has_its_own_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    choose_python()
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert "HEADRACE_SPARK_PYTHON" not in os.environ
