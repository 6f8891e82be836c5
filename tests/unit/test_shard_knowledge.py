"""What a node knows of its shard, and what it logs of that."""

import pytest

from headrace.cluster.node_settings import NodeSettings
from headrace.cluster.shard_knowledge import ShardKnowledge
from headrace.storage.replicated.epochs import StoredManifest
from headrace.storage.replicated.manifest import Manifest

RELEASED = Manifest(epoch=3, owner="a", released=True, successor="b")


@pytest.fixture
def knowledge() -> ShardKnowledge:
    found = ShardKnowledge(NodeSettings("test", "b", "/data", ()))
    found.adopt(StoredManifest(RELEASED, "1"), 0)
    return found


def test_a_successor_logs_that_another_node_took_over(
    knowledge: ShardKnowledge, caplog: pytest.LogCaptureFixture
) -> None:
    assert knowledge.adopt(StoredManifest(Manifest(epoch=4, owner="c"), "2"), 1)
    assert caplog.messages == ["another node took over  node=b owner=c reason=this node did not claim it in time"]


def test_a_successor_that_claims_nothing_logs_the_reason(
    knowledge: ShardKnowledge, caplog: pytest.LogCaptureFixture
) -> None:
    knowledge.hold_off()
    knowledge.adopt(StoredManifest(Manifest(epoch=4, owner="a"), "2"), 1)
    assert caplog.messages == ["another node took over  node=b owner=a reason=its disk has failed"]


@pytest.mark.parametrize(
    "after",
    [
        Manifest(epoch=4, owner="b"),
        Manifest(epoch=3, owner="a", released=True, successor="b", change=1, checkpoint="x"),
    ],
    ids=["took over itself", "same epoch"],
)
def test_a_successor_logs_nothing_else(
    knowledge: ShardKnowledge, after: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    knowledge.adopt(StoredManifest(after, "2"), 1)
    assert not caplog.messages
