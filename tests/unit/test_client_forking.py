"""Programs that fork: parent and child share nothing, and nothing is lost, doubled or waits for ever."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.forked_client import ROLES

from headrace.server import EmbeddedServer

PROGRAM = Path(__file__).parent / "forked_client.py"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = EmbeddedServer(":memory:", host="127.0.0.1", port=0)
    host, port = server._server.addresses[0]
    yield f"headrace://{host}:{port}"
    server.close()


@pytest.mark.parametrize("role", [role.__name__ for role in ROLES])
def test_a_program_that_forks(role: str, address: str) -> None:
    run = subprocess.run(
        [sys.executable, PROGRAM, role, address], capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in run.stderr, run.stderr
