"""The security definitions of a cluster: one document in the shared store, changed by compare-and-set."""

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from headrace.cluster.definitions import DefinitionsRecord, SharedDefinitions
from headrace.model.errors import HeadraceError, StoreUnavailable, VersionConflict
from headrace.model.security_requests import (
    Binding,
    BindingAdd,
    Grant,
    RoleSet,
    SecurityAlter,
    SecurityDescribe,
    TokenCreate,
)
from headrace.security.definitions import DefinitionsChange, SecurityDefinitions
from headrace.security.tokens import verified_token
from headrace.storage.replicated.keys import definitions_key
from headrace.storage.stores.memory import MemoryStore
from headrace.storage.stores.store import StoredObject
from headrace.storage.worker import Worker
from headrace.testing.workbench import Workbench

READ = [Grant(["consume"], "topic", ["*"])]


class UnreliableStore(MemoryStore):
    """Answers are lost, before or after the change, as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        """Of the next operations: `before`, `after` or empty."""
        self.away = False

    def _attempt(self, operation: Callable[[], Any]) -> Any:
        fault = "before" if self.away else self.faults.pop(0) if self.faults else ""
        if fault == "before":
            raise StoreUnavailable("lost before")
        outcome = operation()
        if fault == "after":
            raise StoreUnavailable("lost after")
        return outcome

    def put_new(self, key: str, data: bytes) -> None:
        """Put, perhaps without an answer."""
        self._attempt(lambda: MemoryStore.put_new(self, key, data))

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace, perhaps without an answer."""
        return str(self._attempt(lambda: MemoryStore.replace(self, key, data, version)))

    def get(self, key: str) -> StoredObject | None:
        """Read, unless the store is away."""
        found: StoredObject | None = self._attempt(lambda: MemoryStore.get(self, key))
        return found


def node(store: MemoryStore, directory: str | None = None) -> tuple[Workbench, SharedDefinitions]:
    """A broker whose definitions are in a store."""
    shared = SharedDefinitions(store, "test", sleep=lambda _: None)
    return Workbench(directory, definitions=shared.attach), shared


def test_a_change_is_seen_by_other_nodes_at_their_next_look() -> None:
    store = MemoryStore()
    (one, _), (other, seen) = node(store), node(store)
    heard: list[int] = []
    seen.on_change(lambda document: heard.append(document.version))
    one.ask(RoleSet("inspector", READ))
    created = one.ask(TokenCreate("ada"))
    assert other.ask(SecurityDescribe()).version == 0
    seen.poll()
    assert heard == [], "listeners run on the broker's thread"
    other.run()
    assert heard == [2]
    assert other.ask(SecurityDescribe()).version == 2
    assert verified_token(seen.load(), created.token, other.now_us)[0] == created.info.id


def test_a_broker_that_has_ended_is_told_nothing_and_the_next_one_has_the_change() -> None:
    store = MemoryStore()
    (one, _), (former, shared) = node(store), node(store)
    heard: list[int] = []
    shared.on_change(lambda document: heard.append(document.version))
    shared.detach()
    one.ask(RoleSet("inspector", READ))
    shared.poll()
    former.run()
    assert heard == []
    assert Workbench(None, definitions=shared.attach).ask(SecurityDescribe()).version == 1


def test_of_two_changes_of_the_same_version_one_is_refused() -> None:
    store = MemoryStore()
    (one, _), (other, _) = node(store), node(store)
    one.ask(RoleSet("inspector", READ, expected_version=0))
    with pytest.raises(VersionConflict) as refused:
        other.ask(RoleSet("reader", READ, expected_version=0))
    assert refused.value.details == {"version": 1}
    assert other.ask(SecurityDescribe()).version == 1, "the one that was refused knows why"
    assert other.ask(RoleSet("reader", READ)).version == 2


def test_changes_that_name_no_version_all_happen() -> None:
    store = MemoryStore()
    one, _ = node(store)
    answers = [one.begin(RoleSet(f"role-{number}", READ)) for number in range(4)]
    one.run()
    assert sorted(answer.outcome.version for answer in answers) == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(50))
def test_lost_answers_change_the_document_once(seed: int) -> None:
    random, store = Random(seed), UnreliableStore()
    one, shared = node(store)
    for number in range(10):
        store.faults = [random.choice(["", "before", "after"]) for _ in range(4)]
        one.ask(RoleSet(f"role-{number}", READ))
        assert shared.load().version == number + 1
    store.faults = []
    assert len(SharedDefinitions(store, "test").load().roles) == 10


def test_while_the_store_is_away_the_last_known_document_counts_and_changes_fail() -> None:
    store = UnreliableStore()
    one, shared = node(store)
    one.ask(RoleSet("inspector", READ))
    store.away = True
    with pytest.raises(StoreUnavailable, match="not known whether"):
        one.ask(BindingAdd(Binding("inspector", "ada")))
    shared.poll()
    one.run()
    assert one.ask(SecurityDescribe()).version == 1
    store.away = False
    assert one.ask(BindingAdd(Binding("inspector", "ada"))).version == 2


def test_a_change_whose_answer_never_came_is_seen_later() -> None:
    store = UnreliableStore()
    one, shared = node(store)
    one.ask(RoleSet("inspector", READ))
    store.faults = ["after"] + ["before"] * 30
    with pytest.raises(StoreUnavailable):
        one.ask(RoleSet("reader", READ))
    store.faults = []
    shared.poll()
    one.run()
    assert shared.load().version == 2
    assert set(shared.load().roles) == {"inspector", "reader"}


def test_a_store_that_went_back_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    one, shared = node(store)
    one.ask(RoleSet("inspector", READ))
    one.ask(SecurityAlter(True))
    store.delete([definitions_key("test")])
    store.put_new(definitions_key("test"), msgspec.json.encode(DefinitionsRecord(nonce="old")))
    for _ in range(3):
        shared.poll()
    one.run()
    assert shared.load().enabled
    assert sum("restored from a backup" in one.getMessage() for one in caplog.records) == 1


def test_definitions_of_an_imported_journal_become_those_of_the_cluster(tmp_path: Path) -> None:
    plain = Workbench(str(tmp_path))
    plain.ask(RoleSet("inspector", READ))
    plain.ask(SecurityAlter(True))
    before = plain.broker.definitions.load()
    plain.close()
    store = MemoryStore()
    one, shared = node(store, str(tmp_path))
    assert shared.load() == before
    assert SharedDefinitions(store, "test").load() == before
    one.close()


def test_an_import_does_not_replace_definitions_that_a_cluster_has(tmp_path: Path) -> None:
    store = MemoryStore()
    node(store)[0].ask(RoleSet("cluster", READ))
    plain = Workbench(str(tmp_path))
    plain.ask(RoleSet("inspector", READ))
    plain.close()
    assert set(node(store, str(tmp_path))[1].load().roles) == {"cluster"}


def test_a_directory_that_leaves_its_cluster_has_the_definitions(tmp_path: Path) -> None:
    store = MemoryStore()
    one, _ = node(store, str(tmp_path))
    one.ask(RoleSet("inspector", READ))
    one.ask(BindingAdd(Binding("inspector", "ada")))
    created = one.ask(TokenCreate("ada"))
    one.ask(SecurityAlter(True))
    one.close()
    (again, shared) = node(store, str(tmp_path))
    again.close()
    plain = Workbench(str(tmp_path))
    assert plain.broker.definitions.load() == shared.load()
    assert verified_token(plain.broker.definitions.load(), created.token, plain.now_us)[0] == created.info.id
    plain.close()


def test_the_poll_thread_tells_within_its_interval() -> None:
    store, heard = MemoryStore(), threading.Event()
    shared = SharedDefinitions(store, "test")

    class Ports:
        new_worker = Worker

        def call_threadsafe(self, call: Callable[[], None]) -> None:
            call()

    shared.attach(Ports()).on_change(lambda _: heard.set())
    shared.start(0.01)
    other, _ = node(store)
    other.ask(RoleSet("inspector", READ))
    assert heard.wait(10)
    shared.close()


def test_a_change_of_a_document_that_was_read_before_is_refused_without_asking_the_store() -> None:
    store = UnreliableStore()
    _, shared = node(store)
    outcomes: list[SecurityDefinitions | HeadraceError] = []
    store.away = True
    shared.compare_and_set(DefinitionsChange(enabled=True), 7, 0, outcomes.append)
    assert isinstance(outcomes[0], VersionConflict)
