"""A node whose epoch is not confirmed refuses requests, but takes what goes on with, or ends, what a session has open.

Credit has no answer: a client whose credit was refused would wait for ever for messages.
"""

from typing import cast

import pytest

from headrace.broker.cluster_handlers import ClusterPort
from headrace.model.errors import NotServing
from headrace.model.leasing import Lease, SubscriptionCreate
from headrace.model.reading import Fetch, StreamClose, StreamCredit, StreamOpen
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseOpen
from headrace.testing.memory_disk import MemoryDisk
from headrace.testing.workbench import Workbench


class _Node:
    """A node that may have lost its shard."""

    is_unconfirmed = False

    def check_current(self) -> None:
        """Refuse while it is unconfirmed."""
        if self.is_unconfirmed:
            raise NotServing("unconfirmed")


def _bench() -> tuple[Workbench, _Node]:
    bench, node = Workbench("/data", disk=MemoryDisk()), _Node()
    bench.publish("orders", [b"a" * 100])
    bench.publish("orders", [b"b" * 100])
    bench.ask(SubscriptionCreate("orders", "workers"))
    bench.broker.cluster = cast(ClusterPort, node)
    return bench, node


def test_a_stream_takes_its_credit() -> None:
    bench, node = _bench()
    stream = bench.begin(StreamOpen("orders", 0, 0, credit_bytes=1, stream=1))
    assert stream.read(1, bench.now_us).next_offset == 1
    assert stream.read(1, bench.now_us) is None
    node.is_unconfirmed = True
    with pytest.raises(NotServing):
        bench.ask(Fetch("orders", 0, 0))
    bench.ask(StreamCredit(1, 1000))
    assert stream.read(1, bench.now_us).next_offset == 2
    bench.ask(StreamClose(1))
    bench.close()


def test_a_standing_request_for_leases_takes_its_credit() -> None:
    bench, node = _bench()
    leased: list[str] = []
    session = bench.broker.connect(lambda pushed: leased.append(type(pushed.answer).__name__), "worker", bench.now_us)
    opened = bench.ask(LeaseOpen("orders", "workers", credit_messages=0, credit_bytes=1 << 20), session=session)
    node.is_unconfirmed = True
    with pytest.raises(NotServing):
        bench.ask(Lease("orders", "workers"))
    bench.ask(LeaseCredit(opened.standing, 1, 0), session=session)
    assert leased == ["LeaseDelivery"]
    bench.ask(LeaseClose(opened.standing), session=session)
    bench.close()
