"""Packages of npm for tests: installed once per run of the tests, at the version that a test names."""

import json
import shutil
import subprocess
import tempfile
from atexit import register
from functools import cache
from pathlib import Path
from typing import Any

import pytest

INSTALL_S = 180
RUN_S = 60

needs_npm = pytest.mark.skipif(
    shutil.which("npm") is None or shutil.which("node") is None,
    reason="no npm: install Node.js with apt-get install nodejs npm",
)


@cache
def npm_package(package: str) -> Path:
    """A directory whose `node_modules` has this package, such as `cloudevents@10.0.0`; skips if there is none."""
    place = Path(tempfile.mkdtemp(prefix="headrace-npm-"))
    register(shutil.rmtree, place, ignore_errors=True)
    (place / "package.json").write_text("{}")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", package]
    done = subprocess.run(command, cwd=place, capture_output=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install {package}: {done.stderr.decode()[-500:]}")
    return place


def run_node(package: str, script: str, given: Any) -> Any:
    """Run a script that gets JSON as `given` and calls `answer` with JSON."""
    place = npm_package(package)
    whole = (
        'const given = JSON.parse(require("fs").readFileSync(0, "utf8"));\n'
        "const answer = found => process.stdout.write(JSON.stringify(found));\n" + script
    )
    done = subprocess.run(
        ["node", "-e", whole],
        cwd=place,
        input=json.dumps(given).encode(),
        capture_output=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return json.loads(done.stdout)
