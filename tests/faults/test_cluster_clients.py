"""The clients of the cluster's fault tests, with a plain broker that is killed: their history has no mistakes."""

import os
import time
from pathlib import Path
from random import Random, SystemRandom

from tests.faults.broker_process import BrokerProcess
from tests.faults.cluster_history import now_us
from tests.faults.cluster_stage import ClusterClients
from tests.faults.fork_server import Nursery

KILLS = 3


def test_clients_live_through_kills_of_a_plain_broker(tmp_path: Path) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", SystemRandom().getrandbits(32)))
    print(f"HEADRACE_SEED={seed}")  # pytest shows it when the test fails
    dice = Random(seed)
    with Nursery(tmp_path) as nursery:
        broker = BrokerProcess(nursery, tmp_path / "data")
        broker.start()
        address = broker.tcp_url.removeprefix("headrace://")
        clients = ClusterClients(nursery, tmp_path, seed, broker.tcp_url, {"n1": address})
        clients.start()
        for _ in range(KILLS):
            clients.wait_for_progress(now_us(), broker.check)
            time.sleep(dice.uniform(0, 0.3))
            broker.kill()
            broker.start()
        clients.wait_for_progress(now_us(), broker.check)
        final = clients.finish()
        counts = clients.counts()
        assert not (found := clients.mistakes(final)), "\n".join(found[:20])
        assert counts["sent"] > 20 * KILLS, f"this tested next to nothing: {counts}"
        broker.stop()
