"""Clients of a cluster: they find the node that serves, follow it, and go nowhere that is less secure."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import make_ca
from tests.cluster_nodes import INFO, ScriptedNode, free_port, not_serving
from tests.conformance.faces import awaitable

import headrace
from headrace import errors
from headrace.client.connection.addresses import HOSTS_MAX, parse_address
from headrace.client.connection.endpoints import DIAL_TIMEOUT_S, FIRST_DIAL_TIMEOUT_S, Endpoints
from headrace.client.connection.http_upgrade import HttpUpgrade
from headrace.client.connection.redirects import URLS_MAX, fitting_addresses
from headrace.model.requests import Done
from headrace.wire.frames import Frame, frame
from headrace.wire.native import Kind, failure

Story = Callable[[Any], Awaitable[None]]
Run = Callable[..., None]
BLACK_HOLE = "192.0.2.1"
"""An address of which nothing comes back (RFC 5737)."""


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a story with a bus."""

    async def bus_and(url: str, story: Story, options: dict[str, Any]) -> None:
        if request.param == "sync":
            bus = awaitable(await asyncio.to_thread(headrace.connect, url, **options))
        else:
            bus = await headrace.connect_async(url, **options)
        async with bus:
            await story(bus)

    def told(url: str, story: Story, **options: Any) -> None:
        asyncio.run(asyncio.wait_for(bus_and(url, story, {"timeout": 20.0, **options}), 60))

    return told


@pytest.fixture
def nodes() -> Iterator[list[ScriptedNode]]:
    made = [ScriptedNode() for _ in range(3)]
    yield made
    for node in made:
        node.close()


def listed(*nodes: ScriptedNode) -> str:
    return "headrace://" + ",".join(node.url.removeprefix("headrace://") for node in nodes)


async def asks(bus: Any) -> None:
    assert await bus.info() == INFO


# Addresses.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("headrace://a,b", "headrace://a:7390,b:7390"),
        ("headrace://a:1,b:2,[::1]:3?tenant=acme", "headrace://a:1,b:2,[::1]:3?tenant=acme"),
        ("headraces://a,b:2?ca=/ca.pem&token_file=/a,b", "headraces://a:7390,b:2?token_file=/a%2Cb&ca=/ca.pem"),
        ("http://a,b:80/x/y/?tenant=t", "http://a:7391,b:80/x/y?tenant=t"),
        ("headrace://a:1,A:1,b,b:7390", "headrace://a:1,b:7390"),
        ("headrace+unix:///run/a,b", "headrace+unix:///run/a%2Cb"),
    ],
)
def test_an_address_of_several_hosts(text: str, shown: str) -> None:
    address = parse_address(text)
    assert str(address) == shown
    assert parse_address(shown) == address
    assert len({str(each) for each in address.each()}) == len(address.each()) == 1 + len(address.others)


@pytest.mark.parametrize(
    "text",
    [
        "headrace://a,",
        "headrace://,a",
        "headrace://a,,b",
        "headrace://a,headrace://b",
        "http://a,http://b",
        "headrace://a,b:port",
        "headrace://a,b:0",
        "headrace://a,b/path",
        "headrace://a,b#x",
        "headrace://a:1:2,b",
        "headrace+unix://a,b/run/socket",
        "headrace://" + ",".join(f"h{number}" for number in range(HOSTS_MAX + 1)),
    ],
)
def test_what_is_no_address_of_several_hosts(text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="headrace://127"):
        parse_address(text)


@pytest.mark.parametrize("text", ["headrace://ann:se,cret@a", "headrace://a,ann:secret@b", "headrace://a,b:secret/x@c"])
def test_a_password_in_a_list_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="is no address") as told:
        parse_address(text)
    assert "cret" not in str(told.value)


# Where a redirect may lead.

ALL = ["headrace://b:1", "headraces://b:2", "http://b:3/p", "https://b:4", "headrace+unix:///run/b"]


@pytest.mark.parametrize(
    ("given", "has_token", "followed"),
    [
        ("headrace://a", True, ["headrace://b:1"]),
        ("headraces://a?ca=/c", True, ["headraces://b:2?ca=/c"]),
        ("http://a?tenant=t", True, ["http://b:3/p?tenant=t"]),
        ("https://a", True, ["https://b:4"]),
        ("unix:///run/a", True, ["headraces://b:2", "https://b:4"]),
        ("unix:///run/a", False, ["headraces://b:2", "https://b:4"]),
    ],
)
def test_the_url_that_fits_the_scheme_is_chosen(given: str, has_token: bool, followed: list[str]) -> None:
    chosen = fitting_addresses(parse_address(given), ALL, has_token=has_token)
    assert [str(address) for address in chosen] == followed


@pytest.mark.parametrize(
    ("given", "urls", "followed"),
    [
        ("headraces://a", ["headrace://b:1", "http://b:3"], []),
        ("https://a", ["http://b:1", "headrace://b:2"], []),
        ("headraces://a", ["headrace://b:1", "https://b:4"], ["https://b:4"]),
        ("headrace://a", ["https://b:4", "http://b:3"], ["http://b:3"]),
        ("headrace://a", ["headraces://b:2"], ["headraces://b:2"]),
    ],
)
def test_a_redirect_never_leaves_tls(given: str, urls: list[str], followed: list[str]) -> None:
    assert [str(each) for each in fitting_addresses(parse_address(given), urls, has_token=True)] == followed


def test_a_token_of_a_unix_socket_never_goes_over_the_network_without_tls() -> None:
    given, urls = parse_address("unix:///run/a"), ["headrace://b:1"]
    assert fitting_addresses(given, urls, has_token=True) == []
    assert [str(each) for each in fitting_addresses(given, urls, has_token=False)] == urls


@pytest.mark.parametrize(
    "urls",
    [
        None,
        7,
        "headrace://b:1",
        {"headrace://b:1": 1},
        [None, 7, b"headrace://b:1", ["headrace://b:1"]],
        ["", "b:1", "ftp://b:1", "file:///etc/passwd", "javascript:alert(1)", "//b:1"],
        ["headrace://ann:secret@b:1", "headrace://ann@b:1"],
        ["headrace://b:1?tenant=other", "headrace://b:1?token_file=/etc/shadow", "headrace://b:1?ca=/x"],
        ["headrace://b:1#x", "headrace://b:1/x", "headrace://b:0", "headrace://b:99999", "headrace://b"],
        ["headrace://0.0.0.0:7390", "headrace://[::]:7390"],
        ["headrace://b:1,c:2"],
        ["headrace://" + "b" * 5000 + ":1"],
        ["unix:///run/other"],
    ],
)
def test_garbage_is_not_followed(urls: Any) -> None:
    assert fitting_addresses(parse_address("headrace://a"), urls, has_token=False) == []


def test_of_a_huge_list_only_the_beginning_is_looked_at() -> None:
    given = parse_address("headrace://a")
    many = [f"headrace://b{number}:1" for number in range(100_000)]
    assert len(fitting_addresses(given, many, has_token=False)) == HOSTS_MAX
    assert fitting_addresses(given, ["ftp://x"] * URLS_MAX + many, has_token=False) == []


# Which address is dialled, and for how long.


def test_the_last_owner_is_dialled_first_and_forgotten_when_it_fails() -> None:
    endpoints = Endpoints(parse_address("headrace://a,b,c"))
    given = parse_address("headrace://a,b,c").each()
    orders = set()
    for _ in range(200):
        attempt, dialled = endpoints.attempt(10.0), []
        while (found := attempt.next()) is not None:
            dialled.append(found[0])
        orders.add(tuple(dialled))
    assert len(orders) == 6
    endpoints.served(given[2], [])
    for _ in range(20):
        found = endpoints.attempt(10.0).next()
        assert found == (given[2], FIRST_DIAL_TIMEOUT_S)
    attempt = endpoints.attempt(10.0)
    assert attempt.next() is not None
    attempt.failed(given[2], errors.ConnectionFailed("gone"))
    assert any(endpoints.attempt(10.0).next() != found for _ in range(100))


def test_the_only_address_has_all_the_time_and_one_of_several_more_each_time() -> None:
    alone = Endpoints(parse_address("headrace://a")).attempt(30.0).next()
    assert alone is not None
    assert alone[1] == DIAL_TIMEOUT_S
    endpoints, times = Endpoints(parse_address("headrace://a,b")), []
    for _ in range(6):
        attempt = endpoints.attempt(30.0)
        while (found := attempt.next()) is not None:
            times.append(found[1])
            attempt.failed(found[0], errors.ConnectionFailed("no answer"))
    assert times == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0, 10.0, 10.0, 10.0, 10.0]


def test_nodes_that_are_told_of_are_dialled_after_those_given() -> None:
    endpoints = Endpoints(parse_address("headrace://a"))
    assert not endpoints.is_cluster
    endpoints.served(parse_address("headrace://a"), ["headrace://a:7390", "headrace://b:1", "headraces://b:2"])
    attempt, dialled = endpoints.attempt(10.0), []
    while (found := attempt.next()) is not None:
        dialled.append(str(found[0]))
    assert dialled == ["headrace://a:7390", "headrace://b:1"]
    assert endpoints.is_cluster


# Connecting.


def test_a_follower_sends_the_client_to_the_node_that_serves(nodes: list[ScriptedNode], run: Run) -> None:
    follower, owner, _ = nodes
    follower.follow(owner.url)

    async def story(bus: Any) -> None:
        for _ in range(3):
            await asks(bus)
        owner.hang_up()
        await asks(bus)

    run(f"{follower.url}?tenant=acme", story, token="secret-token", name="redirected")
    assert len(follower.hellos) == 1  # the owner is remembered
    hello = owner.hellos[0]
    assert (hello.tenant, hello.credentials, hello.name) == ("acme", b"secret-token", "redirected")


def test_a_dead_host_costs_a_second_and_no_more(nodes: list[ScriptedNode], run: Run) -> None:
    owner = nodes[0]
    began = time.monotonic()
    run(f"headrace://{BLACK_HOLE}:7390,127.0.0.1:{free_port()},127.0.0.1:{owner.port}", asks)
    assert time.monotonic() - began < 4


def test_a_new_client_waits_while_no_node_serves(nodes: list[ScriptedNode], run: Run) -> None:
    for node in nodes:
        node.follow()
    timer = threading.Timer(0.7, nodes[1].serve)
    timer.start()
    began = time.monotonic()
    run(listed(*nodes), asks)
    assert 0.5 < time.monotonic() - began < 5
    assert 3 <= sum(len(node.hellos) for node in nodes) < 60  # with pauses


def test_a_cluster_that_does_not_serve_in_time_cannot_be_reached(nodes: list[ScriptedNode], run: Run) -> None:
    nodes[0].follow()
    for options in ({"timeout": 0.5}, {"timeout": 20.0, "wait": 0.5}):
        began = time.monotonic()
        with pytest.raises(errors.ConnectionFailed, match="this node follows"):
            run(nodes[0].url, asks, **options)
        assert 0.3 < time.monotonic() - began < 5


def test_all_failures_are_told_when_no_node_answers(run: Run) -> None:
    ports = [free_port() for _ in range(5)]
    with pytest.raises(errors.ConnectionFailed, match=r"no node of headrace://.* can be reached.*and 2 more"):
        run("headrace://" + ",".join(f"127.0.0.1:{port}" for port in ports), asks, timeout=0.5)


def test_nodes_that_refer_to_each_other_do_not_keep_a_client_busy(nodes: list[ScriptedNode], run: Run) -> None:
    first, second, third = nodes
    first.follow(second.url)
    second.follow(third.url)
    third.follow(first.url)
    with pytest.raises(errors.ConnectionFailed):
        run(first.url, asks, timeout=1.0)
    assert sum(len(node.hellos) for node in nodes) < 60


def test_a_node_that_refers_to_itself_is_tried_again(nodes: list[ScriptedNode], run: Run) -> None:
    nodes[0].follow(nodes[0].url)
    threading.Timer(0.4, nodes[0].serve).start()
    run(nodes[0].url, asks)


def test_an_endless_chain_of_redirects_ends(nodes: list[ScriptedNode], run: Run) -> None:
    """Each answer names another host, all of which are the same node."""
    owner, count = nodes[0], 0

    def lead_on(to: socket.socket, ask: Frame) -> None:
        nonlocal count
        count += 1
        owner.refuse(to, ask, not_serving(f"headrace://127.0.{count >> 8}.{count & 255}:{owner.port}"))

    owner.close()
    owner = nodes[0] = ScriptedNode("0.0.0.0")
    owner.says[Kind.HELLO] = lead_on
    with pytest.raises(errors.ConnectionFailed):
        run(f"headrace://127.0.0.1:{owner.port}", asks, timeout=1.0)
    assert count < 200


@pytest.mark.parametrize(
    "told",
    [
        ["headrace://ann:secret@127.0.0.1:{port}"],
        ["ftp://127.0.0.1:{port}", "headrace+unix:///run/x", 7, None],
        ["headrace://127.0.0.1:{port}"] * 0,
        [f"headrace://h{number}.invalid:1" for number in range(1000)],
    ],
)
def test_redirects_to_nowhere_are_survived(nodes: list[ScriptedNode], run: Run, told: list[Any]) -> None:
    evil, elsewhere = nodes[0], nodes[1]
    evil.follow(*(url.format(port=elsewhere.port) if isinstance(url, str) else url for url in told))
    threading.Timer(0.5, evil.serve).start()
    run(evil.url, asks)
    assert not elsewhere.hellos


def test_a_redirect_from_tls_to_plain_is_not_followed(nodes: list[ScriptedNode]) -> None:
    endpoints = Endpoints(parse_address("headraces://a:1"), has_token=True)
    attempt = endpoints.attempt(10.0)
    found = attempt.next()
    assert found is not None
    attempt.failed(found[0], not_serving(nodes[0].url))
    assert attempt.next() is None
    assert isinstance(attempt.error(), errors.NotServing)


def test_with_tls_a_client_goes_to_nodes_with_tls_that_its_ca_has_signed(
    nodes: list[ScriptedNode], run: Run, tmp_path: Path
) -> None:
    files, others = make_ca(tmp_path / "ca").make_server(), make_ca(tmp_path / "stranger").make_server()
    made = []
    for certificate in (files, files, others):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)
        made.append(ScriptedNode(tls=context))
    follower, owner, stranger = made
    plain = nodes[0]
    try:
        follower.follow(plain.url, owner.url)
        run(follower.url, asks, ca=files.ca, token="secret-token")
        assert owner.hellos[0].credentials == b"secret-token"
        for elsewhere in (plain.url, stranger.url):
            follower.follow(elsewhere)
            with pytest.raises(errors.ConnectionFailed):
                run(follower.url, asks, ca=files.ca, token="secret-token", timeout=1.0)
        assert not plain.hellos
        assert not plain.connections
        assert not stranger.hellos
    finally:
        for node in made:
            node.close()


# Failover.


def test_a_client_that_was_given_one_address_survives_the_loss_of_that_node(
    nodes: list[ScriptedNode], run: Run
) -> None:
    first, second, third = nodes
    first.nodes = [node.url for node in nodes]
    second.follow()
    third.follow()

    async def story(bus: Any) -> None:
        await asks(bus)
        await asyncio.to_thread(first.close)
        threading.Timer(0.3, third.serve).start()
        began = time.monotonic()
        await asks(bus)
        assert time.monotonic() - began < 5

    run(first.url, story)
    assert Kind.INFO in third.asked


def test_a_node_that_falls_silent_is_replaced_within_seconds(nodes: list[ScriptedNode], run: Run) -> None:
    first, second, _ = nodes
    first.nodes = [first.url, second.url]

    async def story(bus: Any) -> None:
        await asks(bus)
        first.says.clear()  # as if it were stopped: its system takes connections and frames
        began = time.monotonic()
        await asks(bus)
        assert time.monotonic() - began < 7

    run(first.url, story)
    assert Kind.INFO in second.asked


def test_requests_that_are_refused_by_a_node_which_has_ceased_to_serve_go_to_the_next(
    nodes: list[ScriptedNode], run: Run
) -> None:
    first, second, _ = nodes

    def cease(to: socket.socket, ask: Frame) -> None:
        first.refuse(to, ask, not_serving(second.url))
        first.says.pop(Kind.HELLO, None)  # it is not dialled again

    async def story(bus: Any) -> None:
        await asks(bus)
        first.says[Kind.INFO] = first.says[Kind.TOPIC_DELETE] = cease
        with pytest.raises(errors.Timeout):  # it is sent again although it must not be done twice: nothing was done
            await bus.delete_topic("t")
        await asks(bus)
        assert Kind.TOPIC_DELETE in second.asked

    run(first.url, story, timeout=2.0)


def test_after_fenced_a_request_is_repeated_only_if_it_does_no_harm(nodes: list[ScriptedNode], run: Run) -> None:
    first, second, _ = nodes

    def fenced(to: socket.socket, ask: Frame) -> None:
        first.follow(second.url)
        first.refuse(to, ask, errors.Fenced("sealed by another"))

    async def story(bus: Any) -> None:
        first.says[Kind.TOPIC_DELETE] = fenced
        with pytest.raises(errors.ConnectionFailed, match="sealed by another"):
            await bus.delete_topic("t")
        await asks(bus)
        assert Kind.TOPIC_DELETE not in second.asked

    run(listed(first), story)
    first.serve()
    first.says[Kind.INFO] = fenced
    second.asked.clear()
    run(listed(first), asks)
    assert Kind.INFO in second.asked


def test_a_failure_of_the_whole_connection_says_where_to_go(nodes: list[ScriptedNode], run: Run) -> None:
    first, second, _ = nodes

    def leave(to: socket.socket, _ask: Frame) -> None:
        to.sendall(bytes(frame(Kind.FAILURE, 0, failure(not_serving(second.url)))))

    async def story(bus: Any) -> None:
        first.says[Kind.TOPIC_DELETE] = first.says[Kind.INFO] = leave
        with pytest.raises(errors.ConnectionFailed):
            await bus.delete_topic("t")
        await asks(bus)

    run(first.url, story)
    assert len(first.hellos) == 1
    assert Kind.TOPIC_DELETE not in second.asked


def test_what_a_node_had_not_handled_when_it_left_is_sent_to_the_next(nodes: list[ScriptedNode], run: Run) -> None:
    first, second, _ = nodes

    def leave(handled: int) -> Callable[[socket.socket, Frame], None]:
        def say(to: socket.socket, ask: Frame) -> None:
            first.follow(second.url)
            left = not_serving(second.url)
            left.details["last_handled"] = ask.correlation + handled
            to.sendall(bytes(frame(Kind.FAILURE, 0, failure(left))))

        return say

    async def unhandled(bus: Any) -> None:
        first.says[Kind.TOPIC_DELETE] = leave(-1)
        second.says[Kind.TOPIC_DELETE] = lambda to, ask: second.answer(to, ask, Done())
        await bus.delete_topic("t")  # sent again although it must not be done twice

    async def handled(bus: Any) -> None:
        first.says[Kind.TOPIC_DELETE] = leave(0)
        with pytest.raises(errors.ConnectionFailed):
            await bus.delete_topic("t")

    run(first.url, unhandled)
    assert Kind.TOPIC_DELETE in second.asked
    first.serve()
    second.asked.clear()
    run(first.url, handled)
    assert Kind.TOPIC_DELETE not in second.asked


def test_a_store_that_is_away_is_waited_for_where_that_does_no_harm(nodes: list[ScriptedNode], run: Run) -> None:
    first = nodes[0]

    def away(to: socket.socket, ask: Frame) -> None:
        serving = ScriptedNode.serve
        threading.Timer(0.2, serving, [first]).start()
        first.refuse(to, ask, errors.StoreUnavailable("no answer of the store"))

    async def story(bus: Any) -> None:
        first.says[Kind.INFO] = away
        await asks(bus)
        first.says[Kind.TOPIC_DELETE] = away
        with pytest.raises(errors.StoreUnavailable):
            await bus.delete_topic("t")

    run(first.url, story)


# Over HTTP.


def answered(response: bytes, url: str = "http://a") -> errors.HeadraceError:
    with pytest.raises(errors.HeadraceError) as told:
        HttpUpgrade(parse_address(url)).receive(response + b"\r\n\r\n")
    return told.value


def test_the_answers_of_nodes_that_follow_over_http() -> None:
    moved = answered(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://b:7391/p/v1/native")
    assert isinstance(moved, errors.NotServing)
    assert moved.details["addresses"] == ["http://b:7391/p"]
    for location in (b"/elsewhere", b"ftp://b", b"headrace://b:1", b""):
        error = answered(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: " + location)
        assert type(error) is errors.ConnectionFailed
    assert type(answered(b"HTTP/1.1 301 Moved\r\nLocation: https://b:1/v1/native")) is errors.ConnectionFailed
    assert type(answered(b"HTTP/1.1 503 Unavailable\r\nRetry-After: 1")) is errors.ConnectionFailed


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"code":"not_serving","detail":"none serves"}', errors.NotServing),
        (b'{"code":"draining","detail":"later"}', errors.Draining),
        (b'{"code":"not_serving","details":7}', errors.NotServing),
        (b'{"code":"busy","detail":"no"}', errors.ConnectionFailed),
        (b'["not_serving"]', errors.ConnectionFailed),
        (b"[" * 5000, errors.ConnectionFailed),
    ],
)
def test_problems_of_nodes_that_follow(body: bytes, kind: type[Exception]) -> None:
    head = b"HTTP/1.1 503 Unavailable\r\nContent-Type: application/problem+json\r\nContent-Length: %d\r\n\r\n"
    with pytest.raises(errors.HeadraceError) as told:
        HttpUpgrade(parse_address("http://a")).receive(head % len(body) + body)
    assert type(told.value) is kind


class FollowingHttpServer:
    """Answers every request with one response, and closes the connection."""

    def __init__(self, response: bytes) -> None:
        self.response = response
        self.count = 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                self.count += 1
                connection.sendall(self.response)

    def close(self) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self._thread.join(10)


def test_a_redirect_over_http_leads_to_the_node_that_serves(run: Run) -> None:
    from tests.http_client import http_server, url_of

    with http_server() as server:
        location = f"{url_of(server)}/v1/native".encode()
        node = FollowingHttpServer(b"HTTP/1.1 307 Moved\r\nLocation: " + location + b"\r\n\r\n")
        busy = FollowingHttpServer(
            b"HTTP/1.1 503 Unavailable\r\nContent-Type: application/problem+json\r\nRetry-After: 1\r\n"
            b'Content-Length: 22\r\n\r\n{"code":"not_serving"}'
        )

        async def story(bus: Any) -> None:
            receipt = await bus.publish("orders", b"3 apples")
            assert receipt.offset >= 0

        try:
            run(f"http://127.0.0.1:{node.port}", story)
            assert node.count == 1
            run(f"http://127.0.0.1:{busy.port},127.0.0.1:{node.port}", story)
            with pytest.raises(errors.ConnectionFailed):
                run(f"http://127.0.0.1:{busy.port}", story, timeout=0.5)
            assert busy.count > 2
        finally:
            node.close()
            busy.close()
