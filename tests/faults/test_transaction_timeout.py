"""A commit that was not answered in time can be repeated, and commits everything."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.conformance.faces import awaitable
from tests.faults.broker_process import BrokerProcess
from tests.faults.fork_server import Nursery

import headrace
from headrace import errors

TOPICS = ("a", "b", "c")


@pytest.mark.parametrize("face", ["sync", "async"])
def test_a_commit_after_a_timeout_commits_all_batches(tmp_path: Path, face: str) -> None:
    with Nursery(tmp_path) as nursery:
        broker = BrokerProcess(nursery, tmp_path / "data")
        broker.start()
        broker.connect().close()

        async def story() -> None:
            opened = headrace.connect(broker.tcp_url, timeout=30) if face == "sync" else None
            async with awaitable(opened) if opened else await headrace.connect_async(broker.tcp_url, timeout=30) as bus:
                transaction = bus.transaction("mix")
                await transaction.begin()
                for topic in TOPICS:
                    for number in range(100):
                        await transaction.publish(topic, b"%d" % number)
                os.kill(broker.pid, signal.SIGSTOP)
                try:
                    for _ in range(2):
                        with pytest.raises(errors.Timeout):
                            await transaction.commit(timeout=0.2)
                finally:
                    os.kill(broker.pid, signal.SIGCONT)
                await transaction.commit()
                for topic in TOPICS:
                    assert await bus.offsets(topic) == {0: 100}

        asyncio.run(asyncio.wait_for(story(), 60))
        broker.stop()
