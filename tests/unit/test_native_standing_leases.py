"""Standing lease requests over the native protocol: frames, the end of a connection, a client that does not read."""

import time
from collections.abc import Iterator

import pytest
from tests.native_client import NativeClient

from headrace.model.batch import Columns, encode
from headrace.model.errors import ProtocolError
from headrace.model.leasing import Ack, Holding, LeasedPortion, SubscriptionDelete, SubscriptionDescribe
from headrace.model.requests import Publish, TopicCreate
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseDelivery, LeaseEnd, LeaseOpen
from headrace.server import EmbeddedServer
from headrace.wire.native import Kind, Ping, decode

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(":memory:")
    yield server
    server.close()


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[NativeClient]:
    with NativeClient(server.connect()) as client:
        client.hello()
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest, client: NativeClient) -> str:
    topic = f"jobs.{abs(hash(request.node.name))}"
    client.ask(TopicCreate(topic))
    return topic


def publish(client: NativeClient, topic: str, count: int, value: bytes = b"x") -> None:
    client.ask(Publish(topic, 0), bytes(encode(Columns([value] * count), 1_700_000_000_000_000).data))


def delivered(client: NativeClient) -> LeaseDelivery:
    """The next delivery."""
    found = client.receive()
    assert found.kind == Kind.LEASE_DELIVERY
    delivery: LeaseDelivery = decode(found.kind, found.head)
    assert found.body
    return delivery


def offsets(portions: list[LeasedPortion]) -> list[int]:
    return [offset for portion in portions for offset in portion.all_offsets]


def leased(client: NativeClient, topic: str) -> tuple[int, int]:
    info = client.ask(SubscriptionDescribe(topic))
    return info.ready, info.leased


def wait_for(client: NativeClient, topic: str, wanted: tuple[int, int]) -> None:
    """Wait until so many are ready, and so many leased."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := leased(client, topic)) != wanted:
        assert time.monotonic() < deadline, f"{found} are ready and leased, not {wanted}"


def test_a_delivery_follows_the_answer_and_credit_has_none(client: NativeClient, topic: str) -> None:
    publish(client, topic, 3)
    standing = client.ask(LeaseOpen(topic, credit_messages=2)).standing
    first = delivered(client)
    assert (first.standing, offsets(first.portions)) == (standing, [0, 1])
    client.send(LeaseCredit(standing, 1))
    second = delivered(client)
    assert offsets(second.portions) == [2]
    portions = [*first.portions, *second.portions]
    holdings = [Holding(one.partition, one.lease, one.offsets, one.following) for one in portions]
    assert client.ask(Ack(topic, holdings)).refused == []
    client.ask(LeaseClose(standing))
    client.send(LeaseCredit(standing, 5))
    client.ask(Ping())


def test_credit_cannot_be_taken_back(client: NativeClient, topic: str) -> None:
    standing = client.ask(LeaseOpen(topic)).standing
    sent = client.send(LeaseCredit(standing, -1))
    with pytest.raises(ProtocolError):
        client.answer(Ping(), sent)


def test_the_end_is_told(client: NativeClient, topic: str) -> None:
    standing = client.ask(LeaseOpen(topic)).standing
    client.ask(SubscriptionDelete(topic))
    found = client.receive()
    end: LeaseEnd = decode(found.kind, found.head)
    assert (found.kind, end.standing, end.code) == (Kind.LEASE_END, standing, "subscription_not_found")


def test_the_end_of_a_connection_gives_back_what_is_bound_to_it(
    server: EmbeddedServer, client: NativeClient, topic: str
) -> None:
    publish(client, topic, 5)
    with NativeClient(server.connect()) as other:
        other.hello()
        other.ask(LeaseOpen(topic, credit_messages=3, session_bound=True))
        assert len(offsets(delivered(other).portions)) == 3
        assert leased(client, topic) == (2, 3)
    wait_for(client, topic, (5, 0))


def test_a_client_that_does_not_read_holds_up_nobody(server: EmbeddedServer, client: NativeClient, topic: str) -> None:
    with NativeClient(server.connect()) as still:
        still.hello()
        still.ask(LeaseOpen(topic, credit_messages=1 << 40, credit_bytes=1 << 40))
        for _ in range(100):  # 50 MB, of which the socket and a few deliveries take only a part
            publish(client, topic, 10, b"x" * 50_000)
        assert 0 < leased(client, topic)[0] < 1000
        client.ask(LeaseOpen(topic, credit_messages=1))
        assert len(offsets(delivered(client).portions)) == 1
        while leased(client, topic)[0]:  # it goes on when it reads
            delivered(still)
