"""Holders of leases in processes of their own, to be killed and stopped; they write down what they ask for and hear."""

import contextlib
import socket
import time
from random import Random
from typing import Any
from urllib.parse import urlsplit

from tests.faults.broker_records import Book, Pages
from tests.faults.lease_history import DONE, EXTEND, LeaseHistory
from tests.native_client import NativeClient

from headrace.model.errors import HeadraceError
from headrace.model.leasing import Ack, Extend, Holding, Lease, Reject, Release
from headrace.model.request import Answer

TOPIC = "jobs"
LEASE_MS = 300
LEASE_US = LEASE_MS * 1000
_NEAR_US = 3000
"""So near the end of a lease, on both sides of it, much is said."""
_TIMEOUT_S = 60.0
_DOING: tuple[tuple[str, ...], ...] = (
    ("ack",),
    ("ack",),
    ("ack",),
    ("extend", "ack"),
    ("extend",),
    ("extend", "extend", "release"),
    ("release",),
    ("release", "ack"),
    ("reject",),
    ("extend", "reject"),
    (),
)


def now_us() -> int:
    """The time; the broker is on the same machine."""
    return time.time_ns() // 1000


class Holder:
    """A connection that leases and settles, and a book of what it asked for and was told."""

    def __init__(self, port: int, name: str, book: Book) -> None:
        self._port = port
        self._name = name
        self._book = book
        self._number = 0
        self.client = self._connected()

    def connect_again(self) -> None:
        """After the connection was lost, with the answers that were to come."""
        self.client.close()
        self.client = self._connected()

    def lease(self, count: int, wait_ms: int) -> list[tuple[int, int, int, list[int]]]:
        """Lease messages: partitions, tokens, ends and offsets."""
        return self.leased(self.ask_to_lease(count, wait_ms))

    def ask_to_lease(self, count: int, wait_ms: int) -> int:
        """Ask for messages, and do not wait for the answer."""
        return self.client.send(Lease(TOPIC, messages_max=count, lease_ms=LEASE_MS, wait_ms=wait_ms))

    def leased(self, sent: int) -> list[tuple[int, int, int, list[int]]]:
        """What was leased by a request that was sent."""
        answer, _ = self.client.answer(Lease(TOPIC), sent)
        held = [(one.partition, one.lease, one.until_us, list(one.all_offsets)) for one in answer.portions]
        self._book.write(
            *(
                ("leased", partition, offset, token, until_us - LEASE_US, until_us)
                for partition, token, until_us, offsets in held
                for offset in offsets
            )
        )
        return held

    def ask(self, verb: str, partition: int, token: int, offsets: list[int]) -> tuple[int, Answer, int]:
        """Say something about messages, and do not wait for the answer."""
        self._number += 1
        holdings = [Holding(partition, token, offsets)]
        requests = {
            "ack": Ack(TOPIC, holdings),
            "extend": Extend(TOPIC, holdings, LEASE_MS),
            "release": Release(TOPIC, holdings),
            "reject": Reject(TOPIC, holdings),
        }
        lease_us = LEASE_US if verb == EXTEND else 0
        self._book.write(
            ("asked", self._number, verb, token, now_us(), lease_us, partition, ",".join(map(str, offsets)))
        )
        return self._number, requests[verb], self.client.send(requests[verb])

    def hear(self, number: int, request: Any, sent: int) -> dict[int, str]:
        """What became of it, by offset."""
        answer, _ = self.client.answer(request, sent)
        time_us = now_us()
        refused = {(one.partition, one.offset): one.code for one in answer.refused}
        [holding] = request.holdings
        outcomes = {offset: refused.get((holding.partition, offset), DONE) for offset in holding.all_offsets}
        self._book.write(
            *(
                ("answered", number, holding.partition, offset, outcome, time_us, answer.until_us)
                for offset, outcome in outcomes.items()
            )
        )
        return outcomes

    def _connected(self) -> NativeClient:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            with contextlib.suppress(OSError, EOFError, HeadraceError):
                client = NativeClient(socket.create_connection(("127.0.0.1", self._port)), _TIMEOUT_S)
                client.hello(self._name)
                return client
            assert time.monotonic() < deadline, "the broker cannot be reached"
            time.sleep(0.005)


def hold(number: int, seed: int, url: str, book: str) -> None:
    """Lease and settle for as long as we live, much of it just before or just after the end of a lease."""
    dice = Random(f"{seed}/holder/{number}")
    port = urlsplit(url).port
    assert port is not None
    holder = Holder(port, f"holder-{number}", Book(book))
    while True:
        try:
            for held in holder.lease(dice.choice((1, 1, 3, 10)), wait_ms=300):
                _deal_with(holder, dice, *held)
        except (OSError, EOFError):
            holder.connect_again()
        except HeadraceError:
            continue  # nobody knows whether it was done


def _deal_with(holder: Holder, dice: Random, partition: int, token: int, until_us: int, offsets: list[int]) -> None:
    while offsets:
        count = dice.randint(1, len(offsets))
        some, offsets = offsets[:count], offsets[count:]
        if dice.random() < 0.4:
            time.sleep(max(until_us + dice.randint(-_NEAR_US, _NEAR_US) - now_us(), 0) / 1e6)
        doing = dice.choice(_DOING)
        if dice.random() < 0.5:  # one after the other, without waiting for answers
            for asked in [holder.ask(verb, partition, token, some) for verb in doing]:
                holder.hear(*asked)
        else:
            for verb in doing:
                holder.hear(*holder.ask(verb, partition, token, some))


def read_history(pages: Pages, history: LeaseHistory) -> None:
    """Take in what holders wrote down."""
    for number, (what, *words) in pages.new():
        who = str(number)
        if what == "leased":
            partition, offset, token, begin_us, until_us = map(int, words)
            history.leased((partition, offset), token, who, begin_us, until_us)
        elif what == "asked":
            asked, verb, token_text, time_us, lease_us, place, offsets = words
            places = [(int(place), int(at)) for at in offsets.split(",")]
            history.asked(int(asked), verb, who, int(token_text), places, int(time_us), int(lease_us))
        else:
            asked, place, at, outcome, time_us, until = words
            told_us = int(until) if outcome == DONE else 0
            history.answered(int(asked), who, (int(place), int(at)), outcome, int(time_us), told_us)
