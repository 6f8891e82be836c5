"""What the suites of leasing share: a bus over each transport, with each face, and names that no other test uses."""

import asyncio
import tempfile
from collections.abc import Iterator

import pytest
from tests.conformance.faces import awaitable
from tests.conformance.stage import Run, Story
from tests.http_client import also_http, needs_http

import headrace
from headrace.server import EmbeddedServer


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, str]]:
    """A broker that listens, for all tests of this module: each has topics of its own."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as directory:
        path = f"{directory}/s"
        server = EmbeddedServer(f"{directory}/data", host="127.0.0.1", port=0, unix_socket=path, **also_http())
        names = {"headrace": "tcp", "headrace+unix": "unix", "http": "http"}
        try:
            yield {names[url.partition(":")[0]]: url for url in server._server.listening}
        finally:
            server.close()


TRANSPORTS = ("embedded", "tcp", "unix")
WITH_HTTP = (*TRANSPORTS, pytest.param("http", marks=needs_http))
"""For suites that matter on every transport: others would tell nothing new over the upgraded connection."""


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest, transport: str, served: dict[str, str]) -> Run:
    """Runs a story with a bus."""

    async def bus_and(story: Story) -> None:
        if request.param == "sync":
            near = transport == "embedded"
            opened = headrace.open(":memory:", name="me") if near else headrace.connect(served[transport], name="me")
            async with awaitable(opened) as bus:
                await story(bus)
        else:
            if transport == "embedded":
                bus = await headrace.open_async(":memory:", name="me")
            else:
                bus = await headrace.connect_async(served[transport], name="me")
            async with bus:
                await story(bus)

    return lambda story: asyncio.run(asyncio.wait_for(bus_and(story), 60))


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    kept = [char if char.isalnum() else "-" for char in request.node.name.removeprefix("test_")]
    return "".join(kept).strip("-")
