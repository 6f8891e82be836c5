"""Requests that the broker sends: to hostile receivers, to receivers that stall, and to addresses it must not reach."""

import asyncio
import gc
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from tests.http_client import needs_http
from tests.receivers import Arrived, answer_ok, certificates, receiver

from headrace.model.errors import AddressRefused, DeliveryFailed, InvalidArgument
from headrace.push import http_client
from headrace.push.address_guard import Address, AddressGuard
from headrace.push.http_client import OutgoingClient
from headrace.runtime.event_loop import new_event_loop

pytestmark = needs_http


@pytest.fixture(params=["the broker's loop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a coroutine on an event loop; none of its sockets and threads may be left."""
    make = new_event_loop if request.param == "the broker's loop" else asyncio.new_event_loop

    def runner(story: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=make) as loop:
            loop.run(asyncio.wait_for(story, 60))

    return runner


def local_client(**more: Any) -> OutgoingClient:
    return OutgoingClient(AddressGuard(["loopback"]), **more)


def resolver(*answers: list[str]) -> tuple[Callable[[str, int], Awaitable[list[Address]]], list[str]]:
    """Answers the first look-up with the first addresses, and so on; the last answer stays."""
    asked: list[str] = []

    async def resolve(host: str, _port: int) -> list[Address]:
        asked.append(host)
        return [ip_address(each) for each in answers[min(len(asked), len(answers)) - 1]]

    return resolve, asked


def test_a_request_and_its_answer(run: Any) -> None:
    async def story() -> None:
        client = local_client(user_agent="headrace/1")
        async with receiver(answer_ok) as there:
            url = f"http://localhost:{there.port}/hook?a=b"
            for _ in range(3):
                response = await client.send("POST", url, {"Content-Type": "text/plain", "X-Id": "7"}, b"hello")
                assert (response.status, response.body, response.is_truncated) == (200, b"ok", False)
                assert response.headers["x-a"] == "1, 2"
            assert there.connections == 3
            request = there.requests[0]
            assert (request.method, request.target, request.body) == ("POST", "/hook?a=b", b"hello")
            assert request.headers["host"] == f"localhost:{there.port}"
            assert request.headers["user-agent"] == "headrace/1"
            assert request.headers["accept-encoding"] == "identity"
            await client.close()
            with pytest.raises(DeliveryFailed, match="stops"):
                await client.send("POST", url)

    run(story())


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "0x7f.1", "0x7f000001", "2130706433", "017700000001", "0177.0.0.1", "0", "0.0.0.0"),
        *("localhost", "[::1]", "[::ffff:127.0.0.1]", "[::]", "[64:ff9b::7f00:1]", "[::ffff:7f00:1]"),
    ],
)
def test_no_spelling_of_this_machine_is_reached(host: str) -> None:
    async def story() -> None:
        client = OutgoingClient(AddressGuard())
        async with receiver(answer_ok) as there:
            with pytest.raises((AddressRefused, DeliveryFailed)) as caught:
                await client.send("GET", f"http://{host}:{there.port}/")
            assert isinstance(caught.value, AddressRefused) or "cannot be resolved" in str(caught.value)
            assert there.connections == 0
        await client.close()

    asyncio.run(story())


def test_the_metadata_of_a_cloud_is_refused_at_once() -> None:
    async def story() -> None:
        client = local_client()
        with pytest.raises(AddressRefused, match="metadata"):
            await client.send("GET", "http://169.254.169.254/latest/meta-data/")
        resolve, _ = resolver(["169.254.169.254"])
        client = local_client(resolve=resolve)
        with pytest.raises(AddressRefused, match=r"metadata.example resolves to 169\.254\.169\.254") as caught:
            await client.send("GET", "http://metadata.example/latest/meta-data/")
        assert caught.value.details == {"host": "metadata.example", "address": "169.254.169.254"}
        await client.close()

    asyncio.run(story())


def test_a_name_that_is_made_to_point_to_this_machine_is_refused_then(run: Any) -> None:
    """127.0.0.2 stands for the public internet: the operator allows it, and 127.0.0.1 not."""

    async def story() -> None:
        resolve, asked = resolver(["127.0.0.2"], ["127.0.0.1"], ["127.0.0.2", "127.0.0.1"], ["127.0.0.2", "::1"])
        client = OutgoingClient(AddressGuard(["127.0.0.2/32"]), resolve=resolve)

        async def answer_and_close(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
            writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
            return False

        async with (
            receiver(answer_and_close, host="127.0.0.2") as public,
            receiver(answer_ok, host="127.0.0.1", port=public.port) as private,
        ):
            url = f"http://rebound.example:{public.port}/"
            assert (await client.send("POST", url, body=b"1")).status == 204
            assert asked == ["rebound.example"]  # once: what was checked is what was connected to
            for _ in range(3):
                with pytest.raises(AddressRefused):
                    await client.send("POST", url, body=b"2")
            assert len(asked) == 4
            assert (public.connections, private.connections) == (1, 0)
        await client.close()

    run(story())


def test_a_redirect_is_an_answer_and_not_followed(run: Any) -> None:
    async def story() -> None:
        async with receiver(answer_ok) as private:

            async def redirect(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
                location = f"http://127.0.0.1:{private.port}/".encode()
                head = b"HTTP/1.1 302 Found\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\nLocation: "
                writer.write(head + location + b"\r\n\r\n")
                return True

            async with receiver(redirect) as there:
                client = local_client()
                for _ in range(2):
                    response = await client.send("POST", f"http://127.0.0.1:{there.port}/", body=b"x")
                    assert response.status == 302
                    assert response.headers["location"].endswith(f":{private.port}/")
                assert "cookie" not in there.requests[1].headers
                assert private.connections == 0
                await client.close()

    run(story())


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with receiver(answer_ok) as proxy, receiver(answer_ok) as there:
            for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
            client = local_client()
            assert (await client.send("GET", f"http://127.0.0.1:{there.port}/")).status == 200
            assert proxy.connections == 0
            await client.close()

    asyncio.run(story())


def test_tls_checks_the_name_of_the_url(run: Any, tmp_path: Path) -> None:
    async def story() -> None:
        both = certificates(tmp_path, "good.example")
        resolve, _ = resolver(["127.0.0.1"])
        async with receiver(answer_ok, tls=both.server) as there:
            client = local_client(trust=both.client, resolve=resolve)
            assert (await client.send("POST", f"https://good.example:{there.port}/", body=b"1")).status == 200
            assert there.requests[0].headers["host"] == f"good.example:{there.port}"
            with pytest.raises(DeliveryFailed, match=r"certificate is refused: Hostname mismatch"):
                await client.send("POST", f"https://bad.example:{there.port}/", body=b"2")
            with pytest.raises(DeliveryFailed, match="certificate is refused"):
                await client.send("POST", f"https://127.0.0.1:{there.port}/", body=b"3")
            await client.close()
            stranger = local_client(resolve=resolve)  # trusts the system's authorities, of which this is none
            with pytest.raises(DeliveryFailed, match="certificate is refused: self"):
                await stranger.send("POST", f"https://good.example:{there.port}/", body=b"4")
            await stranger.close()
            assert len(there.requests) == 1

    run(story())


def test_tls_to_a_port_that_has_none_is_a_failed_delivery(run: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = local_client()
        with pytest.raises(DeliveryFailed, match="TLS failed: WRONG_VERSION_NUMBER"):
            await client.send("POST", f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        await client.close()
        server.close()

    run(story())


async def drip_head(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-Drip: 1\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


async def drip_body(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")
    while True:
        writer.write(b".")
        await writer.drain()
        await asyncio.sleep(0.02)


async def drip_informational(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.005)


async def never_answer(request: Arrived, _writer: asyncio.StreamWriter) -> bool:
    await request.gone()
    return False


@pytest.mark.parametrize("script", [drip_head, drip_body, drip_informational, never_answer])
def test_a_receiver_that_takes_its_time_is_ended(run: Any, script: Any) -> None:
    async def story() -> None:
        client = local_client()
        async with receiver(script) as there:
            with pytest.raises(DeliveryFailed, match=r"did not answer within 0\.3 s") as caught:
                await client.send("POST", f"http://127.0.0.1:{there.port}/", body=b"x", timeout_s=0.3)
            assert caught.value.retryable
            await until(lambda: not there.open)  # the connection is closed, not kept
        await client.close()

    run(story())


def test_a_receiver_that_never_reads_is_ended(run: Any) -> None:
    async def story() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        client = local_client()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        with pytest.raises(DeliveryFailed, match="did not answer within"):
            await client.send("POST", url, body=bytes(16 << 20), timeout_s=0.3)
        await client.close()
        listening.close()

    run(story())


@pytest.mark.parametrize(
    "framing", [b"Transfer-Encoding: chunked", b"Content-Length: 10000000000", b"X: until it ends"]
)
def test_an_endless_body_is_cut(run: Any, framing: bytes) -> None:
    async def endless(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n")
        piece = bytes(4096)
        while True:
            writer.write(b"1000\r\n" + piece + b"\r\n" if b"chunked" in framing else piece)
            await writer.drain()

    async def story() -> None:
        client = local_client()
        async with receiver(endless) as there:
            response = await client.send("POST", f"http://127.0.0.1:{there.port}/", body=b"x")
            assert (response.status, response.is_truncated) == (200, True)
            assert response.body == bytes(http_client.RESPONSE_BYTES_MAX)
            await until(lambda: not there.open)
        await client.close()

    run(story())


async def endless_head(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: " + b"a" * 4000 + b"\r\n")
        await writer.drain()


async def large_head(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Large: " + b"a" * 70_000 + b"\r\n\r\n")
    return True


async def say_nothing(_request: Arrived, _writer: asyncio.StreamWriter) -> bool:
    return False


async def break_off(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    return False


async def talk_nonsense(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"220 smtp.example ESMTP\r\n\r\n")
    return False


async def frame_twice(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabcde")
    return False


async def switch_protocols(request: Arrived, writer: asyncio.StreamWriter) -> bool:
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")
    await request.gone()
    return False


BROKEN = [endless_head, large_head, say_nothing, break_off, talk_nonsense, frame_twice, switch_protocols]


@pytest.mark.parametrize("script", BROKEN)
def test_an_answer_that_is_none_is_a_failed_delivery(run: Any, script: Any) -> None:
    async def story() -> None:
        client = local_client()
        async with receiver(script) as there:
            with pytest.raises(DeliveryFailed, match=r"127\.0\.0\.1") as caught:
                await client.send("POST", f"http://127.0.0.1:{there.port}/", body=b"x", timeout_s=10)
            assert caught.value.retryable
            await until(lambda: not there.open)
        await client.close()

    run(story())


@pytest.mark.parametrize("delay_s", [None, 0.0, 0.02])
def test_answers_beyond_the_first_answer_no_other_request(run: Any, delay_s: float | None) -> None:
    """In the same write, right after it, or while the connection would be idle."""
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

    async def surplus(request: Arrived, writer: asyncio.StreamWriter) -> bool:
        if request.target == "/bad":
            writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")
        elif delay_s is None:
            writer.write(ok * 50)
        else:
            writer.write(ok)
            await asyncio.sleep(delay_s)
            writer.write(ok * 49)
        await writer.drain()
        return True

    async def story() -> None:
        client = local_client()
        async with receiver(surplus) as there:
            url = f"http://127.0.0.1:{there.port}"
            for _ in range(5):
                assert (await client.send("POST", f"{url}/good", body=b"x")).status == 200
                assert (await client.send("POST", f"{url}/bad", body=b"x")).status == 500
            assert len(there.requests) == there.connections == 10
        await client.close()

    run(story())


def test_what_a_receiver_sends_instead_of_http_is_told_in_words(run: Any) -> None:
    async def story() -> None:
        client = local_client()
        async with receiver(talk_nonsense) as there:
            with pytest.raises(DeliveryFailed) as caught:
                await client.send("POST", f"http://127.0.0.1:{there.port}/", body=b"x")
        assert str(caught.value) == f"127.0.0.1:{there.port} sent no answer of HTTP: illegal status line"
        await client.close()

    run(story())


def test_an_answer_that_says_it_is_compressed_is_not_unpacked(run: Any) -> None:
    async def bomb(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00")
        return True

    async def story() -> None:
        client = local_client()
        async with receiver(bomb) as there:
            assert (await client.send("GET", f"http://127.0.0.1:{there.port}/")).body == b"\x1f\x8b\x08\x00"
        await client.close()

    run(story())


def test_a_receiver_that_answers_early_is_heard(run: Any) -> None:
    """It refuses a body by its head, and closes."""

    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await reader.read()  # until the client closes
        writer.close()
        done.set()

    async def story() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = local_client()
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        assert (await client.send("POST", url, body=bytes(64 << 10), timeout_s=10)).status == 413
        await done.wait()
        await client.close()
        server.close()

    run(story())


def test_nobody_listens_and_no_name() -> None:
    async def story() -> None:
        client = local_client()
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        with pytest.raises(DeliveryFailed, match=f"cannot connect to 127.0.0.1:{port}: Connection refused"):
            await client.send("POST", f"http://127.0.0.1:{port}/")
        with pytest.raises(DeliveryFailed, match=r"the name no-such-name\.invalid cannot be resolved"):
            await client.send("POST", "http://no-such-name.invalid/")
        with pytest.raises(DeliveryFailed, match="cannot be resolved"):
            await client.send("POST", f"http://{'a' * 64}.example/")  # a label is too long for DNS
        await client.close()

    asyncio.run(story())


def test_a_second_address_is_tried_when_the_first_does_not_answer(run: Any) -> None:
    async def story() -> None:
        resolve, _ = resolver(["127.0.0.9", "127.0.0.1"])
        client = local_client(resolve=resolve)
        async with receiver(answer_ok) as there:
            assert (await client.send("GET", f"http://two.example:{there.port}/")).status == 200
        await client.close()

    run(story())


def test_a_resolver_that_hangs_holds_neither_the_loop_nor_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Semaphore(0)
    release = threading.Event()

    def hang(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.release()
        release.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer about {host}")

    async def story() -> None:
        client = local_client()
        async with receiver(answer_ok) as there:
            await client.send("GET", f"http://127.0.0.1:{there.port}/")
            monkeypatch.setattr(socket, "getaddrinfo", hang)
            waiting = [client.send("GET", f"http://slow{n}.example/", timeout_s=0.5) for n in range(30)]
            before = threading.active_count()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(each, DeliveryFailed) for each in outcomes)
            assert threading.active_count() - before <= 8
            assert (await client.send("GET", f"http://127.0.0.1:{there.port}/")).status == 200  # needs no look-up
            release.set()
        await client.close()

    asyncio.run(story())


def test_headers_that_cannot_be_sent_are_refused() -> None:
    async def story() -> None:
        client = local_client()
        async with receiver(answer_ok) as there:
            url = f"http://127.0.0.1:{there.port}/"
            for headers in (
                {"Host": "other.example"},
                {"Content-Length": "3"},
                {"transfer-encoding": "chunked"},
                {"Connection": "upgrade"},
                {"X-A": "a\r\nX-B: b"},
                {"X A": "a"},
                {"X-Ä": "a"},
                {"X-A": "\u20ac"},
                {"X-A": "a\x00"},
            ):
                with pytest.raises(InvalidArgument):
                    await client.send("POST", url, headers, b"x")
            with pytest.raises(InvalidArgument):
                await client.send("GET /x HTTP/1.1\r\nX: y", url)
            assert (await client.send("POST", url, {"User-Agent": "mine"}, b"x")).status == 200
            assert there.requests[-1].headers["user-agent"] == "mine"
            assert len(there.requests) == 1
        await client.close()

    asyncio.run(story())


def test_connections_to_a_host_and_in_all_are_bounded(run: Any) -> None:
    async def story() -> None:
        busy: dict[str, int] = {}
        most: dict[str, int] = {}

        async def count(request: Arrived, writer: asyncio.StreamWriter) -> bool:
            host = request.headers["host"]
            busy[host] = busy.get(host, 0) + 1
            busy["all"] = busy.get("all", 0) + 1
            for each in (host, "all"):
                most[each] = max(most.get(each, 0), busy[each])
            await asyncio.sleep(0.005)
            busy[host] -= 1
            busy["all"] -= 1
            return await answer_ok(request, writer)

        resolve, _ = resolver(["127.0.0.1"])
        client = local_client(resolve=resolve, connections_max=5, connections_per_host_max=2)
        async with receiver(count) as there:
            urls = [f"http://h{n % 6}.example:{there.port}/" for n in range(120)]
            assert {each.status for each in await asyncio.gather(*(client.send("POST", url) for url in urls))} == {200}
            assert most.pop("all") <= 5
            assert max(most.values()) <= 2
            assert len(there.open) <= 5
        await client.close()

    run(story())


def test_thousands_of_requests_leave_no_socket(run: Any) -> None:
    count, is_calm = 0, False

    async def mixed(request: Arrived, writer: asyncio.StreamWriter) -> bool:
        nonlocal count
        count += 1
        if is_calm:
            return await answer_ok(request, writer)
        if count % 250 == 7:
            return await never_answer(request, writer)
        if count % 10 == 3:
            return await break_off(request, writer)
        return await answer_ok(request, writer)

    async def story() -> None:
        nonlocal is_calm
        client = local_client()
        async with receiver(mixed) as there:
            url = f"http://127.0.0.1:{there.port}/"
            await client.send("POST", url, body=b"x")
            before = descriptors()
            for _ in range(20):
                sent = (client.send("POST", url, body=b"x", timeout_s=0.3) for _ in range(100))
                outcomes = await asyncio.gather(*sent, return_exceptions=True)
                assert all(isinstance(each, http_client.OutgoingResponse | DeliveryFailed) for each in outcomes)
            tasks = [asyncio.ensure_future(client.send("POST", url, body=b"x")) for _ in range(50)]
            await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: not there.open)  # also without close
            gc.collect()
            await until(lambda: descriptors() <= before)
            is_calm = True
            await client.send("POST", url, body=b"x")  # and it goes on
            waiting = asyncio.ensure_future(client.send("POST", "http://127.0.0.1:1/", body=b"x"))
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(DeliveryFailed):
                await waiting
            await until(lambda: not there.open)

    run(story())


def test_the_library_is_loaded_with_the_first_request() -> None:
    import subprocess
    import sys

    program = (
        "import sys, headrace.push.http_client as c, headrace.push.address_guard as g\n"
        "c.OutgoingClient(g.AddressGuard())\n"
        "assert not {'httpcore2', 'httpx2', 'anyio', 'h11'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ)


async def until(reached: Callable[[], bool]) -> None:
    while not reached():
        await asyncio.sleep(0.01)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
