"""Spark's processes on this machine run the Python of the driver, and import pyspark as it is installed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.spark.fork_server import ForkServer, can_fork
from headrace.spark.local_python import LAUNCHER, choose_python
from headrace.spark.pipelines.processes import start_mark

NAMES = ("PYSPARK_PYTHON", "HEADRACE_SPARK_PYTHON", "HEADRACE_SPARK_FORKS", "SPARK_HOME")


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


@pytest.mark.skipif(not can_fork(), reason="needs /proc")
def test_python_is_forked_from_a_process_that_has_the_modules(tmp_path: Path) -> None:
    program = (
        "import json, os, sys; print(json.dumps([sorted(sys.modules), os.getcwd(), sys.argv[1:], os.environ['WORD'], "
        "sys.stdin.read(), sys.path[:2]])); sys.exit(5)"
    )
    (tmp_path / "said.py").write_text(program)
    server = ForkServer()
    try:
        environment = {**os.environ, "WORD": "a b", "PYTHONPATH": "/nowhere", "HEADRACE_SPARK_FORKS": server.path}
        run = [LAUNCHER, "-m", "said", "one", "two"]
        environment["HEADRACE_SPARK_PYTHON"] = sys.executable
        done = subprocess.run(
            run, cwd=tmp_path, env=environment, input="hello", capture_output=True, text=True, check=False
        )
        assert done.returncode == 5, done.stderr
        modules, *rest = json.loads(done.stdout)
        assert {"pyspark.worker", "headrace.spark.source.stream_reader", "pyarrow"} <= set(modules)
        assert rest == [str(tmp_path), ["one", "two"], "a b", "hello", [str(tmp_path), "/nowhere"]]
    finally:
        server.close()
    assert not Path(server.path).parent.exists()
    again = subprocess.run(run, cwd=tmp_path, env=environment, input="", capture_output=True, text=True, check=False)
    assert again.returncode == 5, again.stderr  # without the server it is Python all the same
    assert "pyarrow" not in json.loads(again.stdout)[0]


@pytest.mark.skipif(not can_fork(), reason="needs /proc")
def test_who_is_killed_takes_the_forked_process_along(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    server = ForkServer()
    environment = {**os.environ, "HEADRACE_SPARK_FORKS": server.path, "HEADRACE_SPARK_PYTHON": sys.executable}
    try:
        for end in (subprocess.Popen.kill, subprocess.Popen.terminate):
            with subprocess.Popen(
                [LAUNCHER, "-m", "waits"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
            ) as started:
                assert started.stdout is not None
                pid = int(started.stdout.readline())
                assert start_mark(pid)
                end(started)
            deadline = time.monotonic() + 60
            while start_mark(pid):
                assert time.monotonic() < deadline
                time.sleep(0.02)
    finally:
        server.close()


def test_what_the_user_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "python3.11")
    choose_python()
    assert os.environ["PYSPARK_PYTHON"] == "python3.11"


def test_a_spark_of_the_users_own_has_its_own_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    choose_python()
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert "HEADRACE_SPARK_PYTHON" not in os.environ
