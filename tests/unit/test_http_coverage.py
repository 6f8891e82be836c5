"""Every request of the broker can be made over HTTP, or it is written here why not."""

import ast
import inspect
import pkgutil
from importlib import import_module

import pytest
from tests.http_client import needs_http

from headrace.gateways import http
from headrace.model.request import REQUESTS
from headrace.wire import native

pytestmark = needs_http

_HELD = "it lasts as long as a connection does: WS /v1/socket has it; over plain HTTP"
ELSEWHERE = {
    "Hello": "the head of each request says what it says",
    "Ping": "a request of HTTP has no connection to keep alive; GET /healthz answers whether the process does",
    "GroupJoin": f"{_HELD} one reads all partitions, and commits for a group with POST /v1/groups/{{group}}/commits",
    "GroupRelease": f"{_HELD} there are no members",
    "GroupLeave": f"{_HELD} there are no members",
    "StreamCredit": f"{_HELD} the flow of bytes itself holds a stream back",
    "StreamClose": f"{_HELD} a client ends a stream by closing it",
    "LeaseStop": f"{_HELD} a client that goes away withdraws the lease that it waits for",
    "LeaseOpen": f"{_HELD} POST .../leases with wait_ms is repeated",
    "LeaseCredit": f"{_HELD} there are no standing leases",
    "LeaseClose": f"{_HELD} there are no standing leases",
    "SubjectUnsubscribe": f"{_HELD} a client ends a live stream by closing it",
    "ServeOpen": f"{_HELD} nobody could be asked",
    "ServeClose": f"{_HELD} nobody could be asked",
    "ReplySend": f"{_HELD} nobody could be asked",
    "NodeReport": "the nodes of a cluster send it to each other, over the native protocol",
}
"""Requests without a path, and why."""


def asked_over_http() -> set[str]:
    """The names of all classes that modules of the gateway instantiate, or make routes of."""
    names: set[str] = set()
    for module in pkgutil.iter_modules(http.__path__):
        tree = ast.parse(inspect.getsource(import_module(f"{http.__name__}.{module.name}")))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                is_route = node.func.id == "request_route" and isinstance(node.args[0], ast.Name)
                names.add(node.args[0].id if is_route else node.func.id)  # type: ignore[attr-defined]
    return names


def test_every_request_is_reachable_or_it_is_said_why_not() -> None:
    assert native.REQUESTS is REQUESTS, "importing the protocol declares all requests"
    declared = {request.__name__ for request in REQUESTS.values()}
    reached = asked_over_http() & declared
    assert not ELSEWHERE.keys() & reached, "a request with a path is said to have none"
    assert declared - reached == ELSEWHERE.keys()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_reason_is_given(name: str) -> None:
    assert len(ELSEWHERE[name]) > 20
