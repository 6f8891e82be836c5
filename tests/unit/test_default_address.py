"""Where no address is given, $HEADRACE_URL says where the broker is; a name that is no text is refused."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.http_client import http_server, needs_http, url_of

import headrace
from headrace import errors
from headrace.client.connection.addresses import default_address, parse_address, unreachable
from headrace.gateways.addresses import parse_listen_address, unix_url
from headrace.server import EmbeddedServer


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a broker, in the environment."""
    path = tmp_path / "s"
    server = EmbeddedServer(":memory:", unix_socket=str(path))
    monkeypatch.setenv("HEADRACE_URL", f"headrace+unix://{path}")
    yield f"headrace+unix://{path}"
    server.close()


@pytest.mark.parametrize(
    ("parse", "address"),
    [
        (parse_address, "http://ann:hidden@localhost"),
        (parse_address, "http://ann:hid/hidden@localhost"),
        (parse_address, "headrace://ann:hidden@localhost:1#x"),
        (parse_address, "headrace://ann:hidden@localhost?no=1"),
        (parse_address, "headrace://hidden@[::1"),
        (parse_address, "ftp://ann:hidden@localhost"),
        (parse_listen_address, "headrace://ann:hidden@localhost"),
        (parse_listen_address, "http://ann:hidden/@localhost"),
    ],
)
def test_a_password_in_an_address_is_not_shown(parse: Any, address: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        parse(address)
    assert "hidden" not in str(refused.value)


@needs_http
def test_a_broker_that_answers_http_is_told() -> None:
    with http_server() as served, pytest.raises(errors.HeadraceError, match="write http:// instead of headrace://"):
        headrace.connect(url_of(served).replace("http://", "headrace://"), timeout=5)


def test_connect_asks_the_environment(url: str) -> None:
    with headrace.connect() as bus:
        assert bus.info().data == ":memory:"
    with headrace.connect(url) as bus:
        assert bus.info().data == ":memory:"


def test_connect_async_asks_the_environment(url: str) -> None:
    assert url

    async def ask() -> str:
        async with await headrace.connect_async() as bus:
            return (await bus.info()).data

    assert asyncio.run(ask()) == ":memory:"


def test_an_app_asks_the_environment(url: str) -> None:
    assert url
    app = headrace.App()

    @app.on("jobs")
    def stop(job: headrace.Job) -> None:
        assert job.value == b"end"
        app.stop()

    with headrace.connect() as bus:
        bus.publish("jobs", b"end")
    app.run()


def test_without_a_variable_it_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("headrace://far.example:1", ""):
        monkeypatch.setenv("HEADRACE_URL", text)
        assert default_address() == (text or "headrace://127.0.0.1:7390")
    monkeypatch.delenv("HEADRACE_URL")
    assert default_address() == "headrace://127.0.0.1:7390"


def test_a_variable_that_is_no_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_URL", "somewhere")
    with pytest.raises(errors.InvalidArgument, match=r"\$HEADRACE_URL: 'somewhere' is no address"):
        headrace.connect()


def test_an_address_that_is_given_counts_even_if_it_is_wrong(url: str) -> None:
    assert url
    with pytest.raises(errors.InvalidArgument, match="''"):
        headrace.connect("")


@pytest.mark.parametrize("name", [None, 5, b"name"])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="name is a text"):
        headrace.open(":memory:", name=name)

    async def ask() -> None:
        await headrace.open_async(":memory:", name=name)

    with pytest.raises(errors.InvalidArgument, match="name is a text"):
        asyncio.run(ask())
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-server"]


@pytest.mark.parametrize("name", ["a b#c?d%20.sock", "\u00e4,.sock", "\udcff.sock"])
def test_the_url_that_a_server_tells_can_be_connected_to(name: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/{name}"
    server = EmbeddedServer(":memory:", listen=[unix_url("unix", path)])
    try:
        (url,) = server._server.listening
        assert url.isascii()
        assert str(parse_address(url)) == url
        for address in (url, url.removeprefix("headrace+")):
            assert parse_address(address).path == path
            with headrace.connect(address) as bus:
                assert bus.info().listening == [url]
    finally:
        server.close()


def test_a_path_with_a_null_character_is_no_address() -> None:
    with pytest.raises(errors.InvalidArgument, match="null character"):
        parse_address("unix:///run/a%00b")


def test_who_has_no_permission_on_a_socket_is_told_so() -> None:
    denied = PermissionError(13, "Permission denied")
    told = unreachable(parse_address("unix:///run/headrace.sock"), denied)
    assert "no permission for the socket" in told
    assert "is it running" not in told
    assert "is it running" in unreachable(parse_address("unix:///run/headrace.sock"), FileNotFoundError(2, "missing"))
