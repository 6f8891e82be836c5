"""A low limit on open files: the storage takes its share of it, gives files up when there are no more, and goes on."""

import json
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.known import ENVIRONMENT

import headrace
from headrace.errors import ConnectionFailed, LimitExceeded
from headrace.storage.runtime import FILES_MAX, VIEWS_MAX, descriptor_shares

SCRIPT = str(Path(__file__).with_name("limited.py"))


@pytest.mark.parametrize("role", ["broker", "log"])
def test_a_process_that_may_open_few_files(tmp_path: Path, role: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, role, str(tmp_path / "data")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_broker_takes_as_many_connections_as_its_files_allow_and_says_so(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "serve", str(tmp_path / "data")]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline() or "{}")
        try:
            url = f"headrace+unix://{ready['unix_socket']}"
            with ExitStack() as clients:
                first = clients.enter_context(headrace.connect(url, timeout=30))
                connected = 1
                with suppress(LimitExceeded, ConnectionFailed):  # closed, if its answer came too late
                    for _ in range(64):
                        clients.enter_context(headrace.connect(url, timeout=30))
                        connected += 1
                assert 5 < connected < 64
                for number in range(40):
                    assert first.publish(f"t{number}", b"x").offset == 0
        finally:
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=100)
    assert process.returncode == 0, log.decode()
    assert b"open file limit leaves room for fewer connections" in log
    assert b"limit=64" in log


def test_files_and_mappings_fit_the_limit() -> None:
    assert descriptor_shares(1 << 20) == (FILES_MAX, VIEWS_MAX)
    for limit in (64, 128, 256, 1024):
        files, mappings = descriptor_shares(limit)
        assert files + mappings <= limit // 2
    assert min(descriptor_shares(10)) > 0
