"""Publishes with a key that clients give up and repeat, while the shared store of the cluster hangs."""

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.http_client import needs_http
from tests.node_process import PATIENCE_S, NodeProcess, caught_up, connect, eventually
from tests.scenarios.test_cluster_doubt import HANGS_S, hanging_store, outcomes_of


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    started = [NodeProcess(tmp_path, name) for name in "ab"]
    yield started
    for node in started:
        node.end()


def http_publish(url: str, key: str, timeout_s: float) -> int:
    """Publish a message with a key over HTTP; returns the status, or 0 if the connection broke or was given up."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    request = urllib.request.Request(f"{url}/v1/topics/orders/messages", b'{"value":1}', headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


@needs_http
@pytest.mark.parametrize("hangs_s", [1.5, HANGS_S], ids=["briefly", "until the node stops serving"])
def test_a_publish_with_a_key_that_a_client_gave_up_and_repeats_is_stored_once(
    nodes: list[NodeProcess], tmp_path: Path, hangs_s: float
) -> None:
    eventually(lambda: caught_up(nodes, "b"))
    with connect(nodes) as bus:
        bus.create_topic("orders")
        with hanging_store(tmp_path):
            hangs_until_s = time.monotonic() + hangs_s
            assert http_publish(nodes[0].http, "k", 0.5) == 0, "the client gives up"
            wait = outcomes_of(lambda: http_publish(nodes[0].http, "k", PATIENCE_S))
            time.sleep(max(hangs_until_s - time.monotonic(), 0))
        [repeated] = wait()
        assert repeated in ((201,) if hangs_s < HANGS_S else (201, 503, 0))
        eventually(lambda: 201 in [http_publish(node.http, "k", PATIENCE_S) for node in nodes])
        assert bus.offsets("orders") == {0: 1}
