"""Runs the tests of a module over both places where security definitions are: a journal, and a cluster's store."""

import sys
from functools import partial
from typing import Any

import pytest

from headrace.cluster.definitions import SharedDefinitions
from headrace.storage.stores.memory import MemoryStore
from headrace.testing.workbench import Workbench


@pytest.fixture(autouse=True, params=["journal", "store"])
def definitions_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all brokers of a test share a store, or each its own journal. Import it to use it for a module."""
    if request.param == "store":
        store = MemoryStore()

        def attach(bench: Any) -> SharedDefinitions:
            return SharedDefinitions(store, "test", sleep=lambda _: None).attach(bench)

        monkeypatch.setattr(sys.modules[request.module.__name__], "Workbench", partial(Workbench, definitions=attach))
