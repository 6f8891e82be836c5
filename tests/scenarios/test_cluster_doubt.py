"""Calls that must not happen twice, made while the shared store hangs for so long that the node stops serving."""

import fcntl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.node_process import PATIENCE_S, NodeProcess, caught_up, connect, eventually, owner_of

from headrace.errors import ConnectionFailed

DUE = datetime(2040, 1, 1, tzinfo=UTC)
HANGS_S = 7.0
"""Longer than the five seconds after which a node that cannot reach the store stops serving."""
AWAY_S = 2.0
GUARD_FIRST = """
import runpy
from headrace.cluster import epoch_guard
epoch_guard.UNCONFIRMED_US -= 1_000_000
runpy.run_module("headrace", run_name="__main__", alter_sys=True)
"""
"""A node whose guard gives the epoch up before its event loop drops the connections, as on a busy machine: then what
waits for the store is answered.
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    started = [NodeProcess(tmp_path, name, program=("-c", GUARD_FIRST)) for name in "ab"]
    yield started
    for node in started:
        node.end()


@contextmanager
def hanging_store(place: Path) -> Iterator[None]:
    """A directory store in which every change waits; those that wait are made when it goes on."""
    with (place / "store" / "#lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def outcomes_of(*calls: Callable[[], Any]) -> Callable[[], list[Any]]:
    """Begin calls, each on a thread; the function that is returned waits for what they returned or raised."""
    outcomes: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            outcomes[number] = calls[number]()
        except Exception as error:  # noqa: BLE001 it is what the test is about
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()

    def wait() -> list[Any]:
        for thread in threads:
            thread.join(PATIENCE_S)
        return outcomes

    return wait


def http_delete(url: str) -> tuple[int, str | None, bytes]:
    """Delete over HTTP; returns the status, Retry-After and the body, also of a refusal; 0 if the connection broke."""
    request = urllib.request.Request(url, method="DELETE")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, None, b""
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Retry-After"], error.read()
    except OSError:
        return 0, None, b""


def test_what_must_not_happen_twice_happens_once_and_is_told_to_be_in_doubt(
    nodes: list[NodeProcess], tmp_path: Path
) -> None:
    eventually(lambda: caught_up(nodes, "b"))
    with connect(nodes, name="look") as look, connect(nodes, name="shift") as shift, connect(nodes) as other:
        look.create_topic("old")
        look.create_topic("older")
        look.schedule("jobs", b"a", at=DUE, key="k")
        with hanging_store(tmp_path):
            wait = outcomes_of(
                lambda: shift.queue("jobs").edit_matching(shift=timedelta(days=1), key="k"),
                lambda: other.delete_topic("old"),
                lambda: other.publish("jobs", b"b").offset,
                lambda: http_delete(f"{nodes[0].http}/v1/topics/older"),
            )
            time.sleep(HANGS_S)
        shifted, deleted, published, (status, retry_after, body) = wait()
        assert isinstance(shifted, ConnectionFailed)
        assert isinstance(deleted, ConnectionFailed)
        assert published == 1, "a publish is sent again, and stored once"
        assert (status, retry_after) in ((503, None), (0, None))
        assert not status or b"may or may not have happened" in body
        found = list(look.queue("jobs").find())
        assert sorted(one.value for one in found) == [b"a", b"b"]
        [due_us] = [one.due for one in found if one.value == b"a"]
        assert datetime.fromtimestamp((due_us or 0) / 1e6, UTC) in (DUE, DUE + timedelta(days=1))


def test_a_store_whose_directory_goes_away_takes_nothing_until_it_is_back(
    nodes: list[NodeProcess], tmp_path: Path
) -> None:
    """As when it is unmounted, or renamed by mistake: a new directory in its place would take what is acknowledged."""
    store, away = tmp_path / "store", tmp_path / "store.away"
    eventually(lambda: caught_up(nodes, "b"))
    acknowledged: list[bytes] = []
    stops = threading.Event()

    def publish() -> None:
        with connect(nodes, name="publisher") as bus:
            while not stops.is_set():
                value = b"%d" % len(acknowledged)
                bus.publish("jobs", value)
                acknowledged.append(value)

    wait = outcomes_of(publish)
    try:
        eventually(lambda: len(acknowledged) > 20)
        store.rename(away)
        time.sleep(0.2)  # for what was on its way
        before = len(acknowledged)
        time.sleep(AWAY_S)
        assert not store.exists(), "somebody has made the directory again"
        assert len(acknowledged) == before, "a message was acknowledged that is in no store"
        away.rename(store)
        eventually(lambda: len(acknowledged) > before + 20)
    finally:
        stops.set()
    assert wait() == [None]
    with connect(nodes) as bus:
        assert [message.value for message in read_all(bus, "jobs")] == acknowledged
    eventually(lambda: caught_up(nodes, "b" if owner_of(nodes) == "a" else "a"))
    assert "its directory was moved, removed or unmounted" in nodes[0].log.read_text()


def read_all(bus: Any, topic: str) -> list[Any]:
    """All messages of the first partition."""
    return [message for batch in bus.fetch(topic, 0, 0, bytes_max=1 << 24) for message in batch.messages()]
