"""Clients of a simulated cluster, which write down what they ask for and what they are told."""

from random import Random
from typing import Any

from tests.faults.cluster_history import (
    ASK,
    BEGIN,
    COMMIT,
    COMMITTED,
    DONE_WHOLE,
    GIVEN_UP,
    JOIN,
    LEASED,
    POSITION,
    READ,
    SEND,
    SENT,
    TOLD,
    Record,
)

from headrace.model.batch import Columns, Producer, encode, parse
from headrace.model.errors import (
    HeadraceError,
    LogClosed,
    MemberFenced,
    OffsetOutOfRange,
    OutOfOrderSequence,
    TopicExists,
    TransactionFenced,
    TransactionNotFound,
    UnknownMember,
)
from headrace.model.leasing import Ack, Edit, Extend, Holding, Lease, MessageChange, MessageId, Release
from headrace.model.reading import Fetch
from headrace.model.requests import (
    Commit,
    GroupJoin,
    PartitionOffset,
    Publish,
    TopicCreate,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.testing import ClusterAnswer, ClusterClient, ClusterWorkbench

EVENTS, JOBS, PLANS, ONE, TWO = "events", "jobs", "plans", "one", "two"
TOPICS = (EVENTS, JOBS, PLANS, ONE, TWO)
LEASES_MS = (1_000, 1_000, 8_000)
FAR_US = 10**15
"""How far ahead plans are due."""
STALE_MAX = 30
"""An owner that was replaced learns it within so many attempts."""


class Clients:
    """All clients of a world, their history, and what they know."""

    def __init__(self, cluster: ClusterWorkbench) -> None:
        self.cluster = cluster
        self.records: list[Record] = []
        self.plans: dict[int, set[int]] = {}
        """Of every plan: the times at which it may be due; 0: deleted."""
        self.is_stopping = False
        self.running: set[str] = set()
        self._numbers = 0

    def start(self) -> None:
        """Start all clients, once the topics are there."""
        self._spawn("setup", self._setup)

    def _setup(self, client: "ClusterClient", dice: Random, name: str) -> None:
        del dice, name
        for topic in TOPICS:
            try:
                client.ask(TopicCreate(topic, {"segment_bytes": 1 << 16}))
            except TopicExists:
                continue  # an attempt whose answer was lost
        for name_, call in (
            ("producer", self._produce),
            ("jobs", self._produce_jobs),
            ("worker-1", self._work),
            ("worker-2", self._work),
            ("reader", self._read),
            ("group", self._consume),
            ("transactions", self._transact),
            ("planner", self._plan),
        ):
            self._spawn(name_, call)
        for node in self.cluster.machines:
            self._spawn(f"sticky-{node}", self._stick)

    def _spawn(self, name: str, call: Any) -> None:
        dice = Random(f"{self.cluster.simulation.random.random()}/{name}")
        self.running.add(name)

        def run() -> None:
            call(self.cluster.client(name), dice, name)
            self.running.discard(name)

        self.cluster.spawn(name, run)

    def record(self, who: str, what: str, **more: Any) -> Record:
        """Write something down."""
        made = Record(what, who=who, time_us=self.cluster.simulation.now_us, **more)
        self.records.append(made)
        return made

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    # Publishing.

    def _produce(self, client: ClusterClient, dice: Random, name: str) -> None:
        self._publish_all(client, dice, name, EVENTS, 1001)

    def _produce_jobs(self, client: ClusterClient, dice: Random, name: str) -> None:
        self._publish_all(client, dice, name, JOBS, 1002)

    def _publish_all(self, client: ClusterClient, dice: Random, name: str, topic: str, producer: int) -> None:
        number = sequence = 0
        while not self.is_stopping:
            values = [f"{name}.{number + at + 1}" for at in range(dice.randint(1, 4))]
            for at, value in enumerate(values):
                self.record(name, SEND, topic=topic, value=value, number=number + at + 1)
            number += len(values)
            body = batch_of([value.encode() for value in values], Producer(producer, 0, sequence))
            sequence += 1
            told = self._publish(client, topic, body)
            for at, value in enumerate(values):
                self.record(name, SENT, topic=topic, value=value, offset=told.answer.base_offset + at, node=told.node)
            self.cluster.sleep(dice.uniform(0, 0.4))

    def _publish(self, client: ClusterClient, topic: str, body: bytes) -> ClusterAnswer:
        """Publish a batch, again if an owner that was replaced, and does not know it yet, misses the one before it."""
        for _ in range(STALE_MAX):
            try:
                return client.ask(Publish(topic, 0), body)
            except OutOfOrderSequence:
                self.cluster.count("stale refusals")
                client.forget()
                self.cluster.sleep(0.5)
        return client.ask(Publish(topic, 0), body)

    def _stick(self, client: ClusterClient, dice: Random, name: str) -> None:
        """Publish to one node for as long as it answers; whoever it thinks that it is."""
        node, number = name.removeprefix("sticky-"), 0
        while not self.is_stopping:
            number += 1
            value = f"{name}.{number}"
            self.record(name, SEND, topic=EVENTS, value=value)
            try:
                told = client.ask_node(node, Publish(EVENTS, 0), batch_of([value.encode()]))
                self.record(name, SENT, topic=EVENTS, value=value, offset=told.answer.base_offset, node=node)
                self._lease(client, dice, name, node)
            except HeadraceError as error:
                if not error.retryable and not isinstance(error, LogClosed):
                    raise
            self.cluster.sleep(dice.uniform(0.1, 0.6))

    # Reading.

    def fetch(self, client: ClusterClient, topic: str, offset: int) -> tuple[list[tuple[int, str]], int]:
        """The messages from an offset on, and where to go on."""
        for _ in range(STALE_MAX):
            try:
                told = client.ask(Fetch(topic, 0, offset))
                break
            except OffsetOutOfRange:
                # An owner that does not know yet that it was replaced answers for what it has: ask again.
                self.cluster.count("stale reads")
                client.forget()
                self.cluster.sleep(0.5)
        else:
            told = client.ask(Fetch(topic, 0, offset))
        return read_batches(told, offset), told.answer.answer.next_offset

    def _read(self, client: ClusterClient, dice: Random, name: str) -> None:
        """Read all topics, again from the beginning every now and then."""
        positions = dict.fromkeys(TOPICS, 0)
        while not self.is_stopping:
            topic = dice.choice(TOPICS)
            found, positions[topic] = self.fetch(client, topic, positions[topic])
            for offset, value in found:
                self.record(name, READ, topic=topic, offset=offset, value=value)
            if dice.random() < 0.1:
                positions[topic] = 0
            self.cluster.sleep(dice.uniform(0, 0.3))

    def _consume(self, client: ClusterClient, dice: Random, name: str) -> None:
        """Read as a member of a group, commit, and join anew."""
        while not self.is_stopping:
            number = self._next()
            self.record(name, JOIN, number=number)
            joined = client.ask(GroupJoin(name, "member", [EVENTS], session_ms=60_000)).answer
            if not joined.assigned:
                self.cluster.sleep(0.5)
                continue
            [place] = joined.assigned
            self.record(name, POSITION, value=name, topic=EVENTS, offset=place.offset, number=number)
            offset = place.offset
            for _ in range(dice.randint(1, 5)):
                found, offset = self.fetch(client, EVENTS, offset)
                for at, value in found:
                    self.record(name, READ, topic=EVENTS, offset=at, value=value, verb=name)
                self.record(name, COMMIT, value=name, topic=EVENTS, offset=offset)
                committed = PartitionOffset(EVENTS, 0, offset, place.epoch)
                try:
                    client.ask(Commit(name, [committed], "member"), repeats=False)
                except HeadraceError as error:
                    if not error.retryable and not isinstance(error, MemberFenced | UnknownMember):
                        raise
                    break  # nobody knows whether it was done: join again
                self.record(name, COMMITTED, value=name, topic=EVENTS, offset=offset)
                self.cluster.sleep(dice.uniform(0, 0.5))

    # Leases.

    def _work(self, client: ClusterClient, dice: Random, name: str) -> None:
        while not self.is_stopping:
            try:
                self._lease(client, dice, name, "")
            except HeadraceError as error:
                if not error.retryable:
                    raise
            self.cluster.sleep(dice.uniform(0, 0.4))

    def _lease(self, client: ClusterClient, dice: Random, name: str, node: str) -> None:
        def ask(request: Any) -> ClusterAnswer:
            return client.ask_node(node, request) if node else client.ask(request, repeats=False)

        lease_ms = dice.choice(LEASES_MS)
        told = ask(Lease(JOBS, messages_max=dice.choice((1, 3)), lease_ms=lease_ms))
        for portion in answer_of(told).portions:
            offsets = list(portion.all_offsets)
            holding = [Holding(portion.partition, portion.lease, offsets)]
            begin_us = portion.until_us - lease_ms * 1000
            word: Any = {"topic": JOBS, "token": portion.lease, "node": told.node}
            for offset in offsets:
                self.record(name, LEASED, offset=offset, begin_us=begin_us, until_us=portion.until_us, **word)
            if dice.random() < 0.2:
                self._settle(ask, name, "extend", Extend(JOBS, holding, 10_000), offsets, word)
            verb = dice.choice(("ack", "ack", "ack", "release", "forget"))
            if verb == "ack":
                self._settle(ask, name, verb, Ack(JOBS, holding), offsets, word)
            elif verb == "release":
                self._settle(ask, name, verb, Release(JOBS, holding), offsets, word)

    def _settle(self, ask: Any, name: str, verb: str, request: Any, offsets: list[int], word: dict[str, Any]) -> None:
        if verb == "extend":
            # It is longer than any lease: whether it was done or not, the holder relies on what it had.
            ask(request)
            return
        number = self._next()
        asked = [self.record(name, ASK, offset=offset, number=number, verb=verb, **word) for offset in offsets]
        told = ask(request)
        for record in asked:
            record.begin_us = told.time_us  # the holder relied on it at most until then
        refused = {one.offset: one.code for one in answer_of(told).refused}
        for offset in offsets:
            self.record(
                name, TOLD, offset=offset, number=number, error=refused.get(offset, ""), begin_us=told.time_us, **word
            )

    # Transactions and plans.

    def _transact(self, client: ClusterClient, dice: Random, name: str) -> None:
        attempt = sequence = 0
        while not self.is_stopping:
            attempt += 1
            values = [(topic, f"{name}.{sequence}.{attempt}.{topic}.{at}") for topic in (ONE, TWO) for at in range(2)]
            word: Any = {"value": name, "number": sequence, "token": attempt}
            self.record(name, BEGIN, values=values, **word)
            try:
                outcome = self._attempt(client, dice, name, sequence, values)
            except (TransactionFenced, TransactionNotFound):
                continue
            except HeadraceError as error:
                if not error.retryable:
                    raise
                continue
            if outcome == GIVEN_UP:
                self.record(name, GIVEN_UP, **word)
                continue
            if outcome == "repeated":
                word["token"] = 0
            self.record(name, DONE_WHOLE, **word)
            sequence += 1
            self.cluster.sleep(dice.uniform(0, 0.8))

    def _attempt(
        self, client: ClusterClient, dice: Random, name: str, sequence: int, values: list[tuple[str, str]]
    ) -> str:
        begun = client.ask(TransactionBegin(name, sequence)).answer
        if begun.committed:
            return "repeated"
        for topic, value in values:
            client.ask(TransactionStage(name, begun.epoch, topic, 0), batch_of([value.encode()]), repeats=False)
        if dice.random() < 0.1:
            client.ask(TransactionAbort(name, begun.epoch), repeats=False)
            return GIVEN_UP
        client.ask(TransactionCommit(name, begun.epoch), repeats=False)
        return DONE_WHOLE

    def _plan(self, client: ClusterClient, dice: Random, name: str) -> None:
        """Publish messages that are due far ahead, move them, and delete some."""
        sequence = 0
        while not self.is_stopping:
            due_us = FAR_US * 2 + self._next()
            value = f"{name}.{sequence + 1}"
            self.record(name, SEND, topic=PLANS, value=value, number=sequence + 1)
            body = batch_of([value.encode()], Producer(1003, 0, sequence), dues=[due_us])
            sequence += 1
            told = self._publish(client, PLANS, body)
            offset = told.answer.base_offset
            self.record(name, SENT, topic=PLANS, value=value, offset=offset, node=told.node)
            self.plans[offset] = {due_us}
            while dice.random() < 0.6:
                chosen = dice.choice(list(self.plans))
                if 0 not in self.plans[chosen]:
                    self._edit(client, chosen, 0 if dice.random() < 0.2 else FAR_US * 2 + self._next())
            self.cluster.sleep(dice.uniform(0, 0.5))

    def _edit(self, client: ClusterClient, offset: int, due_us: int) -> None:
        change = MessageChange(due_us=due_us) if due_us else MessageChange(delete=True)
        self.plans[offset].add(due_us)
        told = client.ask(Edit(PLANS, [MessageId(0, offset)], change))
        [outcome] = answer_of(told).outcomes
        assert outcome.outcome in ("applied", "message_gone"), outcome
        self.plans[offset] = {due_us}


def batch_of(values: list[bytes], producer: Producer | None = None, **columns: Any) -> bytes:
    """A batch as it is sent."""
    return bytes(encode(Columns(values, **columns), 1, producer=producer or Producer()).data)


def answer_of(told: ClusterAnswer) -> Any:
    """The answer without its body."""
    return getattr(told.answer, "answer", told.answer)


def read_batches(told: ClusterAnswer, offset: int) -> list[tuple[int, str]]:
    """The offsets and values in the body of a fetch."""
    view, found, at = memoryview(told.answer.body), [], 0
    while at < len(view):
        batch = parse(view, at)
        batch.verify()
        columns = batch.columns()
        places = columns.places or range(len(columns.values))
        for place, value in zip(places, columns.values, strict=True):
            if batch.base_offset + place >= offset:
                found.append((batch.base_offset + place, (value or b"").decode()))
        at += batch.length
    return found
