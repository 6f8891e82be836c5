"""Services that ask each other, and what they see when a process dies, a broker restarts or a handler takes long."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.known import ENVIRONMENT

import headrace
from headrace import errors
from headrace.server import EmbeddedServer

SOON_S = 30.0

SERVICE = """
import sys, time
import headrace

app = headrace.App(sys.argv[1])

@app.serves("slow", concurrency=4)
def slow(request):
    time.sleep(float(request.value))
    return b"done"

@app.serves("ask.slow")
def ask(request):
    return headrace.connect(sys.argv[1]).request("slow", request.value, timeout=30).value

app.run()
"""


def until(found: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON_S
    while not found():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"headrace+unix://{tmp_path}/s"


@contextmanager
def broker(place: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(place / "data", host="", unix_socket=f"{place}/s")
    try:
        yield server
    finally:
        server.close()


@contextmanager
def service(address: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that serves `slow`."""
    command = [sys.executable, "-c", SERVICE, address]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=ENVIRONMENT) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def app_at_work(bus: Any, **handlers: Callable[..., Any]) -> Iterator[headrace.App]:
    """An app in a thread, which serves subjects by the names of the handlers."""
    app = headrace.App(bus)
    for subject, handler in handlers.items():
        app.serves(subject, concurrency=4)(handler)
    thread = threading.Thread(target=app.run)
    thread.start()
    try:
        until(lambda: bus.subjects.info().responders == len(handlers))
        yield app
    finally:
        app.stop()
        thread.join(SOON_S)
        assert not thread.is_alive()


class Asked(threading.Thread):
    """A request under way, and what came of it."""

    def __init__(self, bus: headrace.Bus, subject: str, value: bytes = b"", timeout: float = SOON_S) -> None:
        super().__init__(daemon=True)
        self.outcome: Any = None
        self._ask = lambda: bus.request(subject, value, timeout=timeout)
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._ask()
        except errors.HeadraceError as error:
            self.outcome = error

    def answered(self) -> Any:
        self.join(SOON_S)
        assert not self.is_alive()
        return self.outcome


def test_callers_learn_at_once_that_a_service_was_killed(tmp_path: Path, address: str) -> None:
    with broker(tmp_path), headrace.connect(address) as bus, service(address) as process:
        until(lambda: bus.subjects.info().responders == 2)
        asked = [Asked(bus, "slow", b"60") for _ in range(3)]
        until(lambda: bus.subjects.info().requests_open == 3)
        process.kill()
        for one in asked:
            error = one.answered()
            assert isinstance(error, errors.ResponderLost)
            assert error.retryable
        with pytest.raises(errors.NoResponders):
            bus.request("slow", b"0")


def test_the_others_go_on_when_one_of_many_services_dies(tmp_path: Path, address: str) -> None:
    with broker(tmp_path), headrace.connect(address) as bus, service(address) as first, service(address):
        until(lambda: bus.subjects.info().responders == 4)
        asked = [Asked(bus, "slow", b"0.2") for _ in range(12)]  # eight at once, and four wait
        until(lambda: bus.subjects.info().requests_open == 8)
        first.kill()
        outcomes = [one.answered() for one in asked]
        replies = [one for one in outcomes if isinstance(one, headrace.Reply)]
        assert len(replies) >= 8, "what the dead one did not have yet, the other one answers"
        assert all(isinstance(one, headrace.Reply | errors.ResponderLost) for one in outcomes)


def test_nothing_is_left_of_a_caller_that_was_killed(tmp_path: Path, address: str) -> None:
    release = threading.Event()
    code = f"import headrace; headrace.connect({address!r}).request('held', b'x', timeout=600)"
    with broker(tmp_path), headrace.connect(address) as bus, app_at_work(bus, held=lambda: release.wait(SOON_S)):
        connections = bus.info().connections
        caller = subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT)
        until(lambda: bus.subjects.info().requests_open == 1)
        caller.send_signal(signal.SIGKILL)
        caller.wait()
        until(lambda: bus.info().connections == connections)
        release.set()
        until(lambda: bus.subjects.info().late_replies == 1)
        assert bus.subjects.info().requests_open == 0


def test_services_and_listeners_come_back_after_a_restart(tmp_path: Path, address: str) -> None:
    got: list[tuple[str, bytes | None]] = []

    def listen(live: headrace.LiveSubscription) -> None:
        got.extend((message.subject, message.value) for message in live)

    with (
        broker(tmp_path) as server,
        headrace.connect(address) as bus,
        app_at_work(bus, echo=lambda request: request.value),
        bus.subjects.subscribe("news.*") as live,
    ):
        listener = threading.Thread(target=listen, args=(live,))
        listener.start()
        bus.subjects.publish("news.a", b"before")
        assert bus.request("echo", b"1").value == b"1"
        server.close()
        with broker(tmp_path):
            until(lambda: bus.subjects.info().responders == 1)
            until(lambda: bus.subjects.info().subscriptions == 1)
            assert bus.request("echo", b"2").value == b"2"
            bus.subjects.publish("news.b", b"after")
            until(lambda: len(got) == 2)
            live.stop()
            listener.join(SOON_S)
            # The app and the bus end while there is a broker.
            live.close()
    assert got == [("news.a", b"before"), ("news.b", b"after")]


def test_a_request_in_progress_survives_the_orderly_end_of_a_broker(tmp_path: Path, address: str) -> None:
    entered = threading.Event()

    def handle(request: headrace.IncomingRequest) -> bytes:
        entered.set()
        time.sleep(0.3)
        return bytes(request.value)

    server = EmbeddedServer(tmp_path / "data", host="", unix_socket=f"{tmp_path}/s")
    bus = headrace.connect(address, timeout=5)
    app = headrace.App(bus)
    app.serves("slow")(handle)
    thread = threading.Thread(target=app.run)
    thread.start()
    until(lambda: bus.subjects.info().responders == 1)
    asked = Asked(bus, "slow", b"x")
    assert entered.wait(SOON_S)
    server.close()
    assert asked.answered().value == b"x"
    app.stop()
    thread.join(SOON_S)
    bus.close()


def test_an_app_that_stops_answers_what_it_has(tmp_path: Path, address: str) -> None:
    entered = threading.Semaphore(0)

    def handle(request: headrace.IncomingRequest) -> bytes:
        entered.release()
        time.sleep(0.3)
        return bytes(request.value)

    with broker(tmp_path), headrace.connect(address) as bus, headrace.connect(address) as other:
        with app_at_work(bus, work=handle) as app:
            asked = [Asked(other, "work", b"%d" % number) for number in range(4)]
            for _ in asked:
                assert entered.acquire(timeout=SOON_S)
            app.stop()
        assert sorted(one.answered().value for one in asked) == [b"0", b"1", b"2", b"3"]
        assert bus.subjects.info().responders == 0


def test_services_ask_services(tmp_path: Path, address: str) -> None:
    with broker(tmp_path), headrace.connect(address) as bus:

        def price(request: headrace.IncomingRequest) -> float:
            if request.value == b"moon":
                raise LookupError("not for sale")
            return 2.5

        def order(request: headrace.IncomingRequest) -> dict[str, Any]:
            return {"total": 2 * bus.request("price", request.value).json()}

        with app_at_work(bus, price=price, order=order):
            assert bus.request("order", b"plum").json() == {"total": 5.0}
            with pytest.raises(errors.ServiceFailed, match="LookupError: not for sale") as caught:
                bus.request("order", b"moon")
            assert caught.value.error_code == "lookup_error", "the first cause is told through all services"


def test_a_listener_that_stands_still_loses_messages_and_holds_up_nobody(tmp_path: Path, address: str) -> None:
    with (
        broker(tmp_path),
        headrace.connect(address) as bus,
        headrace.connect(address) as publisher,
        bus.subjects.subscribe("flood", buffer_messages=10, timeout=1) as live,
    ):
        for number in range(500):
            publisher.subjects.publish("flood", b"%d" % number + b"x" * 10_000)
        received, published = sum(1 for _ in live), 501
        while not publisher.subjects.publish("flood", b"last").receivers:  # tells what the broker has dropped before
            published += 1
        received += sum(1 for _ in live)
        assert received > 10
        assert received + live.dropped == published


def test_tenants_do_not_see_each_others_subjects_and_services(tmp_path: Path, address: str) -> None:
    with (
        broker(tmp_path),
        headrace.connect(address, tenant="acme") as acme,
        headrace.connect(address, tenant="other") as other,
        app_at_work(acme, echo=lambda request: f"{request.subject} {request.value.decode()}"),
        acme.subjects.subscribe("#", timeout=5) as live,
    ):
        assert acme.request("echo", b"hello").value == b"echo hello"
        with pytest.raises(errors.NoResponders, match="nobody serves echo"):
            other.request("echo", b"hello")
        assert other.subjects.publish("news", b"theirs").receivers == 0
        assert acme.subjects.publish("news", b"ours").receivers == 1
        message = next(iter(live))
        assert (message.subject, message.value) == ("news", b"ours")
        assert other.subjects.info().responders == 0
