"""Workers and the broker are killed while publishers wait for results: every job gets one, and it outlives all."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.broker_process import BrokerProcess
from tests.faults.fork_server import PATIENCE_S, Nursery

import headrace
from headrace.errors import JobFailed
from headrace.model.job_requests import RESULTS_TOPIC

JOBS = 40


def work(url: str, path: str) -> None:
    """In a worker's process: note each job, and answer with its number."""
    app = headrace.App(url, wait=PATIENCE_S)

    @app.on("jobs", concurrency=4, lease=1, retry={"deliveries_max": 50, "retry_seconds": 0.01})
    def handle(job: Any) -> int:
        with Path(path).open("ab") as noted:
            noted.write(job.value + b"\n")
        time.sleep(0.005)
        return int(job.value)

    app.run(stop_on_signals=False)


def hang(url: str, path: str) -> None:
    """In a worker's process: take a job, say so, and never finish."""
    app = headrace.App(url, wait=PATIENCE_S)

    @app.on("jobs", lease=1, retry={"deliveries_max": 1})
    def handle(_job: Any) -> None:
        Path(path).touch()
        time.sleep(PATIENCE_S)

    app.run(stop_on_signals=False)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    with Nursery(tmp_path) as nursery:
        yield nursery


@pytest.fixture
def broker(nursery: Nursery, tmp_path: Path) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(nursery, tmp_path / "data")
    broker.start()
    yield broker
    broker.stop()


def test_a_worker_that_is_killed_for_the_last_time_fails_its_job(
    nursery: Nursery, broker: BrokerProcess, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    with broker.connect() as bus:
        handle = bus.publish("jobs", b"7", reply=True)
        worker = nursery.start("worker", f"{__name__}:hang", broker.tcp_url, str(taken))
        deadline = time.monotonic() + PATIENCE_S
        while not taken.exists():
            assert time.monotonic() < deadline, worker.said()
            time.sleep(0.01)
        assert not handle.done()
        worker.kill()
        with pytest.raises(JobFailed, match="lease expired") as raised:
            handle.result(timeout=PATIENCE_S)
        assert raised.value.error_code == "lease_expired"


@pytest.mark.parametrize("victim", ["worker", "broker"])
def test_every_job_gets_its_result_whoever_is_killed(
    nursery: Nursery, broker: BrokerProcess, tmp_path: Path, victim: str
) -> None:
    noted = tmp_path / "noted"
    with broker.connect() as bus:
        handles = [bus.publish("jobs", b"%d" % number, reply=True) for number in range(JOBS)]
        worker = nursery.start("worker", f"{__name__}:work", broker.tcp_url, str(noted))
        for kill in range(3):
            assert handles[kill * 10].result(timeout=PATIENCE_S) == kill * 10
            if victim == "broker":
                broker.kill()
                broker.start()
            else:
                worker.kill()
                worker = nursery.start("worker", f"{__name__}:work", broker.tcp_url, str(noted))
        assert [handle.result(timeout=PATIENCE_S) for handle in handles] == list(range(JOBS))
        ids = [handle.id for handle in handles]
        worker.kill()
    with broker.connect() as bus:
        assert [bus.job_result(id).result(timeout=PATIENCE_S) for id in ids] == list(range(JOBS))
        assert sum(bus.offsets(RESULTS_TOPIC).values()) == JOBS, "one for each, although some were handled twice"
        assert len(noted.read_bytes().splitlines()) >= JOBS
