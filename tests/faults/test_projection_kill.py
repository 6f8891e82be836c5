"""Processes that run a projection are killed at any moment: nothing is applied twice, and nothing is missing."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random, SystemRandom

import pytest
from benchmarks.leased_postgres import PostgresNode, _found
from tests.faults.fork_server import Nursery
from tests.faults.projection_process import MAKE, TOPIC, TOTALS, store_at, write

import headrace
from headrace.server import EmbeddedServer

PROCESS = "tests.faults.projection_process"
ROUNDS = int(os.environ.get("HEADRACE_KILLS", "22")) // 2


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database."""
    if request.param == "sqlite":
        yield str(tmp_path / "views.db")
        return
    if find_spec("psycopg") is None or _found("postgres") is None:
        pytest.skip("needs postgres and psycopg")
    node = PostgresNode()
    node.start(str(tmp_path), synced=False)
    yield node.address
    node.stop()


def test_a_killed_projection_goes_on_exactly_once(where: str, tmp_path: Path) -> None:
    random = Random(seed := SystemRandom().randrange(1 << 32))
    print("seed", seed)
    with store_at(where) as store:
        store.connection.execute(MAKE)
        store.connection.execute(TOTALS)
    server = EmbeddedServer(tmp_path / "data", unix_socket=str(tmp_path / "s"))
    url, published = f"headrace+unix://{tmp_path}/s", Counter[str]()
    try:
        with headrace.connect(url) as bus, Nursery(tmp_path) as nursery:
            bus.create_topic(TOPIC, partitions=2)
            count = 0
            for number in range(ROUNDS):
                instances = [nursery.start(f"projection-{at}", f"{PROCESS}:project", url, where) for at in range(2)]
                until = time.monotonic() + random.uniform(0.1, 0.5)
                while time.monotonic() < until:
                    keys = [f"k{random.randrange(5)}" for _ in range(random.randrange(1, 20))]
                    bus.publish_many(TOPIC, [b"%d" % (count + at) for at in range(len(keys))], keys=keys)
                    count += len(keys)
                    published.update(keys)
                for instance in instances:
                    if number % 5 != 4:
                        instance.kill()
                if number % 5 == 4:  # sometimes one of them dies while the other goes on
                    instances[0].kill()
                    time.sleep(random.uniform(0, 0.2))
                    instances[1].kill()
            with store_at(where) as store:
                applied = len(store.connection.execute("SELECT * FROM seen").fetchall())
                assert applied, "they were killed before they did anything"
                left = headrace.Projection(bus, TOPIC, "seen", write, store).catch_up()
                rows = store.connection.execute("SELECT part, at, value FROM seen").fetchall()
                totals = dict(store.connection.execute("SELECT key, count FROM totals").fetchall())
            assert applied + left == len(rows) == count
            assert sorted(int(value) for _, _, value in rows) == list(range(count))
            assert totals == published
            for part in range(2):
                offsets = [at for of, at, _ in rows if of == part]
                assert sorted(offsets) == list(range(len(offsets)))
    finally:
        server.close()
