"""Live subscriptions and responders that a node refuses for the moment ask again, new ones until their time-out."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.cluster_nodes import ScriptedNode, not_serving
from tests.conformance.faces import awaitable

import headrace
from headrace import errors
from headrace.model.batch import Columns, encode
from headrace.model.requests import Done
from headrace.model.subject_requests import ServeOpened, SubjectDelivery, SubjectSubscribed
from headrace.wire.frames import Frame, frame
from headrace.wire.native import Kind

FOR_THE_MOMENT = [
    errors.StoreUnavailable("no answer of the store"),
    errors.Busy("try again in a moment"),
    errors.Throttled("too many"),
]
SOON_S = 20.0


@pytest.fixture
def node() -> Iterator[ScriptedNode]:
    made = ScriptedNode()
    yield made
    made.close()


@pytest.fixture(params=["sync", "async"])
def connected(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Connects, with one face of the client or the other."""

    async def connect(url: str, timeout: float = SOON_S) -> Any:
        if request.param == "sync":
            return awaitable(await asyncio.to_thread(headrace.connect, url, timeout=timeout))
        return await headrace.connect_async(url, timeout=timeout)

    return connect


def refuse_first(
    node: ScriptedNode, kind: Kind, refusals: list[Any], then: Callable[[socket.socket, Frame], None]
) -> None:
    """Let a node refuse as many requests of a kind as there are refusals, and accept the next one."""
    left = list(refusals)

    def say(to: socket.socket, ask: Frame) -> None:
        if left:
            node.refuse(to, ask, left.pop(0))
        else:
            then(to, ask)

    node.says[kind] = say


def accept_subscription(node: ScriptedNode) -> Callable[[socket.socket, Frame], None]:
    """Accept a live subscription, and deliver a message to it."""

    def say(to: socket.socket, ask: Frame) -> None:
        node.answer(to, ask, SubjectSubscribed(7))
        batch = encode(Columns([b"3 apples"]), 0)
        batch.place(0, 0, 0)
        head = frame(Kind.SUBJECT_DELIVERY, 0, SubjectDelivery(7, "orders.eu"), len(batch.data))
        to.sendall(bytes(head) + bytes(batch.data))

    node.says[Kind.SUBJECT_UNSUBSCRIBE] = lambda to, ask: node.answer(to, ask, Done())
    return say


def test_a_live_subscription_asks_again(node: ScriptedNode, connected: Callable[..., Any]) -> None:
    """When it begins, and over a later connection, when only the errors of the broker could end it."""

    async def story() -> None:
        async with await connected(node.url) as bus:
            refuse_first(node, Kind.SUBJECT_SUBSCRIBE, FOR_THE_MOMENT, accept_subscription(node))
            async with bus.subjects.subscribe("orders.*", timeout=SOON_S) as orders:
                incoming = aiter(orders)
                assert (await anext(incoming)).value == b"3 apples"
                refuse_first(node, Kind.SUBJECT_SUBSCRIBE, FOR_THE_MOMENT, accept_subscription(node))
                node.hang_up()
                assert (await anext(incoming)).value == b"3 apples"
        assert node.asked.count(Kind.SUBJECT_SUBSCRIBE) == 2 * (len(FOR_THE_MOMENT) + 1)

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.parametrize("refusal", [*FOR_THE_MOMENT, not_serving()])
def test_a_live_subscription_that_is_refused_until_the_time_out_says_why(
    node: ScriptedNode, connected: Callable[..., Any], refusal: errors.HeadraceError
) -> None:
    async def story() -> None:
        async with await connected(node.url, 0.5) as bus:
            node.says[Kind.SUBJECT_SUBSCRIBE] = lambda to, ask: node.refuse(to, ask, refusal)
            with pytest.raises(type(refusal)):
                await bus.subjects.subscribe("orders.*").begin()
        await asyncio.sleep(0.1)  # the last request may be on its way
        asked = node.asked.count(Kind.SUBJECT_SUBSCRIBE)
        await asyncio.sleep(0.3)
        assert node.asked.count(Kind.SUBJECT_SUBSCRIBE) == asked, "it has given up"

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_refusal_for_good_is_raised_at_once(node: ScriptedNode, connected: Callable[..., Any]) -> None:
    async def story() -> None:
        async with await connected(node.url) as bus:
            node.says[Kind.SUBJECT_SUBSCRIBE] = lambda to, ask: node.refuse(to, ask, errors.LimitExceeded("too many"))
            with pytest.raises(errors.LimitExceeded):
                await bus.subjects.subscribe("orders.*").begin()
        assert node.asked.count(Kind.SUBJECT_SUBSCRIBE) == 1

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_responder_asks_again(node: ScriptedNode) -> None:
    """An app that serves a subject, when it starts and over a later connection."""
    serving = threading.Event()

    def accept(to: socket.socket, ask: Frame) -> None:
        node.answer(to, ask, ServeOpened(3))
        serving.set()

    node.says[Kind.SERVE_CLOSE] = lambda to, ask: node.answer(to, ask, Done())
    refuse_first(node, Kind.SERVE_OPEN, FOR_THE_MOMENT, accept)
    with headrace.connect(node.url, timeout=SOON_S) as bus:
        app = headrace.App(bus)
        app.serves("echo")(lambda request: request.value)
        running = threading.Thread(target=app.run, kwargs={"stop_on_signals": False})
        running.start()
        try:
            assert serving.wait(SOON_S)
            serving.clear()
            refuse_first(node, Kind.SERVE_OPEN, FOR_THE_MOMENT, accept)
            node.hang_up()
            assert serving.wait(SOON_S)
        finally:
            app.stop()
            running.join(SOON_S)
        assert not running.is_alive()
    assert node.asked.count(Kind.SERVE_OPEN) == 2 * (len(FOR_THE_MOMENT) + 1)
