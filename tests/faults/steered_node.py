"""A node whose store has faults, which a test switches on and off with a file while the node runs."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.faults.cluster_processes import serve_node

from headrace.storage.stores.store import SharedStore
from headrace.testing.faulty_store import FaultyStore

STEERING = "HEADRACE_TEST_STEERING"
"""The variable with the path of the file: attributes of FaultyStore and their values, as JSON."""
_LOOK_S = 0.02

T = TypeVar("T")


class SteeredStore(FaultyStore):
    """A faulty store that looks into a file for its faults."""

    def __init__(self, inner: SharedStore, path: str) -> None:
        super().__init__(inner, os.getpid(), sleep=time.sleep)
        self._path = path
        self._looked = 0.0
        self._steering = ""

    def _ask(self, verb: str, key: str, call: Callable[[], T]) -> T:
        if time.monotonic() - self._looked > _LOOK_S:
            self._look()
        return super()._ask(verb, key, call)

    def _look(self) -> None:
        self._looked = time.monotonic()
        with open(self._path) as file:
            steering = file.read()
        if steering != self._steering:
            self._steering = steering
            self.heal()
            for name, value in json.loads(steering).items():
                assert hasattr(self, name), name
                setattr(self, name, value)
        if len(self.operations) > 1000:  # nobody reads them here
            self.operations.clear()


def serve_steered(namespace: str, environment: dict[str, str], arguments: list[str]) -> None:
    """In the node's process: be a node with such a store."""
    from headrace.server import cluster_server

    open_store = cluster_server.open_store

    def open_steered(*given: Any, **named: Any) -> SharedStore:
        return SteeredStore(open_store(*given, **named), environment[STEERING])

    setattr(cluster_server, "open_store", open_steered)  # noqa: B010
    serve_node(namespace, environment, arguments)


def steer(path: Path, **faults: Any) -> None:
    """Switch faults on, and all others off; whoever reads the file sees all or nothing of it."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(faults))
    new.replace(path)
