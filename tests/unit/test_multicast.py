"""Publishing to several topics when connections break: each message is there once in all of them, or nowhere."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

import headrace
from headrace import errors
from headrace.client._sync.connection.connection import Connection
from headrace.model.requests import TransactionAbort, TransactionBegin, TransactionCommit, TransactionStage

TOPICS = ["orders", "audit"]


@pytest.fixture
def bus() -> Iterator[headrace.Bus]:
    with headrace.open(":memory:") as bus:
        for topic in TOPICS:
            bus.create_topic(topic)
        yield bus


class Breaking:
    """Requests of a kind arrive, and their answers get lost, a number of times."""

    def __init__(self, kind: type, times: int, *, arrives: bool) -> None:
        self.left = times
        self._kind = kind
        self._arrives = arrives
        self._request = Connection.request

    def __call__(self, connection: Connection, request: Any, *more: Any) -> Any:
        if type(request) is not self._kind or not self.left:
            return self._request(connection, request, *more)
        self.left -= 1
        if self._arrives:
            self._request(connection, request, *more)
        raise errors.ConnectionFailed("the answer got lost")


def ends(bus: headrace.Bus) -> list[int]:
    return [bus.offsets(topic)[0] for topic in TOPICS]


@pytest.mark.parametrize("arrives", [True, False])
def test_a_commit_whose_answer_is_lost_is_repeated(bus: headrace.Bus, arrives: bool) -> None:
    bus.publish(TOPICS, b"1")
    breaking = Breaking(TransactionCommit, 2, arrives=arrives)
    with patch.object(Connection, "request", lambda *arguments: breaking(*arguments)):
        receipts = bus.publish(TOPICS, b"2")
    assert breaking.left == 0
    assert ends(bus) == [2, 2]
    assert [receipt.duplicate for receipt in receipts] == [arrives, arrives]
    assert [receipt.offset for receipt in receipts] == ([-1, -1] if arrives else [1, 1])
    assert [receipt.offset for receipt in bus.publish(TOPICS, b"3")] == [2, 2]


@pytest.mark.parametrize("kind", [TransactionBegin, TransactionStage])
def test_what_comes_before_the_commit_is_repeated(bus: headrace.Bus, kind: type) -> None:
    for arrives in (True, False):
        breaking = Breaking(kind, 1, arrives=arrives)
        with patch.object(Connection, "request", lambda *arguments, of=breaking: of(*arguments)):
            bus.publish(TOPICS, b"x")
    assert ends(bus) == [2, 2]


class Restarting:
    """Before or after requests of a kind, the broker forgets its open transactions, a number of times."""

    def __init__(self, kind: type, times: int, *, after: bool) -> None:
        self.left = times
        self._kind = kind
        self._after = after
        self._request = Connection.request

    def __call__(self, connection: Connection, request: Any, *more: Any) -> Any:
        if type(request) is not self._kind or not self.left:
            return self._request(connection, request, *more)
        self.left -= 1
        if self._after:  # it is committed, and the answer lost
            self._request(connection, request, *more)
        else:
            self._request(connection, TransactionAbort(request.transaction, request.epoch), *more)
            return self._request(connection, request, *more)
        raise errors.TransactionNotFound("there is no open transaction")


@pytest.mark.parametrize("after", [True, False])
def test_a_message_is_published_once_when_the_broker_forgets_its_transaction(bus: headrace.Bus, after: bool) -> None:
    """As it does when it restarts: a transaction that is not committed is begun again."""
    bus.alter_topic("orders", partitions=3)
    bus.publish(TOPICS, b"1")
    restarting = Restarting(TransactionCommit, 1 if after else 3, after=after)
    with patch.object(Connection, "request", lambda *arguments: restarting(*arguments)):
        receipts = bus.publish(TOPICS, b"2")
    assert restarting.left == 0
    assert [receipt.duplicate for receipt in receipts] == [after, after]
    assert sum(bus.offsets("orders").values()) == bus.offsets("audit")[0] == 2
    assert bus.offsets("orders")[receipts[0].partition] == 1
    assert len(bus.publish(TOPICS, b"3")) == 2
    assert sum(bus.offsets("orders").values()) == bus.offsets("audit")[0] == 3


def test_a_broker_that_forgets_again_and_again_ends_in_a_timeout() -> None:
    with headrace.open(":memory:", timeout=0.2) as bus:
        restarting = Restarting(TransactionCommit, 1 << 30, after=False)
        with (
            patch.object(Connection, "request", lambda *arguments: restarting(*arguments)),
            pytest.raises(errors.Timeout, match="publish it again") as caught,
        ):
            bus.publish(TOPICS, b"1")
        assert caught.value.retryable
        assert ends(bus) == [0, 0]


def test_a_publish_that_fails_does_not_disturb_the_next(bus: headrace.Bus) -> None:
    with pytest.raises(errors.InvalidArgument):
        bus.publish(TOPICS, 3)  # type: ignore[call-overload]
    with pytest.raises(errors.PartitionNotFound):
        bus.publish(TOPICS, b"x", partition=7)
    assert ends(bus) == [0, 0]
    assert [receipt.offset for receipt in bus.publish(TOPICS, b"x")] == [0, 0]
