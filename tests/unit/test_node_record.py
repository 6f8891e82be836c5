"""The records of nodes: two processes with one name, and what a stopped one leaves."""

import pytest

from headrace.cluster.node_record import (
    STOPPED,
    NodeRecord,
    NodeRecordWriter,
    UnreadableRecords,
    read_record,
    read_records,
)
from headrace.model.errors import LogInUse
from headrace.storage.replicated.keys import node_key
from headrace.storage.stores.memory import MemoryStore


class WritingNode:
    """A process that renews its record."""

    def __init__(self, store: MemoryStore, process: str) -> None:
        self._writer = NodeRecordWriter(store, "test", "n", process)
        self._record = NodeRecord(node="n", process=process)
        self._beat = 0

    def beat(self, role: str = "following") -> None:
        self._beat += 1
        record = NodeRecord(node="n", process=self._record.process, beat=self._beat, role=role)
        self._writer.write(record)


def test_of_two_processes_with_one_name_the_older_one_keeps_it() -> None:
    store = MemoryStore()
    older, newer = WritingNode(store, "p1"), WritingNode(store, "p2")
    for _ in range(3):
        older.beat()
    newer.beat()
    older.beat()
    with pytest.raises(LogInUse, match="another process has the name n"):
        newer.beat()
    older.beat()


def test_what_a_dead_or_stopped_process_left_is_replaced() -> None:
    store = MemoryStore()
    dead = WritingNode(store, "p1")
    for _ in range(5):
        dead.beat()
    newer = WritingNode(store, "p2")
    newer.beat()
    dead.beat(STOPPED)  # its last word came late
    newer.beat()
    found = read_record(store, "test", "n")
    assert found is not None
    assert found.process == "p2"


@pytest.mark.parametrize("data", [b"garbage", b"", b"\xff\xfe", b"[]", b'{"node": 7}', b'{"role": "\xff"}'])
def test_a_record_that_cannot_be_read_is_ignored_and_told_once(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store, unreadable = MemoryStore(), UnreadableRecords()
    WritingNode(store, "p1").beat()
    store.put_new(node_key("test", "evil"), data)
    for _ in range(3):
        assert [one.node for one in read_records(store, "test", unreadable)] == ["n"]
        assert read_record(store, "test", "evil", unreadable) is None
    assert [one.getMessage().partition("  ")[0] for one in caplog.records] == ["node record cannot be read; ignored"]
    assert "key=test/nodes/evil" in caplog.text


def test_fields_that_a_record_lacks_or_has_beside_are_tolerated() -> None:
    store = MemoryStore()
    store.put_new(node_key("test", "later"), b'{"beat": 3, "colour": "blue"}')
    assert read_records(store, "test") == [NodeRecord(node="later", beat=3)]


def test_a_record_has_the_name_of_its_key() -> None:
    store = MemoryStore()
    WritingNode(store, "p1").beat()
    store.put_new(node_key("test", "evil"), b'{"node": "n", "process": "p9", "beat": 99}')
    assert [(one.node, one.beat) for one in read_records(store, "test")] == [("evil", 99), ("n", 1)]


def test_a_node_replaces_its_own_record_that_cannot_be_read() -> None:
    store = MemoryStore()
    node = WritingNode(store, "p1")
    node.beat()
    store.delete([node_key("test", "n")])
    store.put_new(node_key("test", "n"), b"garbage")
    node.beat()
    found = read_record(store, "test", "n")
    assert found is not None
    assert found.beat == 2
