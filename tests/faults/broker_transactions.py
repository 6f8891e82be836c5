"""Processes that consume, transform and produce in transactions, and one that watches what comes of it."""

import os
import time
from itertools import accumulate
from random import Random
from typing import Any

from tests.faults.broker_records import Book, mark

import headrace

WRITERS = 3
OUTPUTS = (("out-a", 0), ("out-a", 1), ("out-b", 0))
TRANSACTIONS = 10_000
"""As many as the input of a writer is enough for."""
SIZES = [1 + number * 7 % 5 for number in range(TRANSACTIONS)]
"""How many messages of the input each takes."""
STARTS = [0, *accumulate(SIZES)]
"""Where in the input each begins."""
SESSION_S = 1.0
_TIMEOUT_S = 60.0
_SEQUENCES = {start: number for number, start in enumerate(STARTS)}

_REASSIGNED = ("member_fenced", "unknown_member")
"""The input is another's by now, or was assigned anew."""
_PASSING = ("transaction_not_found", "transaction_fenced", *_REASSIGNED)


class _ChangedItsMind(Exception):
    """A writer gives up in the middle of a transaction."""


def input_topic(writer: int) -> str:
    """What a writer consumes."""
    return f"in-{writer}"


def group_of(writer: int) -> str:
    """The group in whose name it does."""
    return f"etl-{writer}"


def input_value(writer: int, offset: int) -> bytes:
    """A message to consume."""
    return b"%d:%d" % (writer, offset)


def output_values(writer: int, sequence: int, output: int) -> list[bytes]:
    """What a transaction produces for one of the outputs, of what it consumes."""
    taken = [input_value(writer, offset) for offset in range(STARTS[sequence], STARTS[sequence + 1])]
    size = 40_000 if sequence % 13 == output else 10  # enough for the broker to have to make room
    return [b"%d.%d.%d.%s." % (writer, sequence, output, value) + b"y" * size for value in taken]


def write(writer: int, life: int, seed: int, url: str, book: str) -> None:
    """Transform what there is, in one transaction after the other, for as long as we live."""
    _Writer(writer, Random(f"{seed}/writer/{writer}/{life}"), url, Book(book)).run()
    time.sleep(3600)  # to be killed


class _Writer:
    def __init__(self, number: int, dice: Random, url: str, book: Book) -> None:
        self._number = number
        self._dice = dice
        self._book = book
        self._bus = headrace.connect(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
        self._subscription: Any = None
        self._fresh = False
        """The group's position is where the broker said, and nothing was tried from there."""

    def run(self) -> None:
        """Transform to the end. Whenever it is not certain how far the group is, ask the broker by joining again."""
        while True:
            self._subscription = self._bus.subscribe(
                input_topic(self._number), group=group_of(self._number), commit="manual", session_timeout=SESSION_S
            )
            self._fresh = True
            if self._transform_all():
                return
            self._subscription.close()

    def _transform_all(self) -> bool:
        taken: list[Any] = []
        sequence = -1
        for message in self._subscription:
            if not taken or message.offset != taken[-1].offset + 1:
                # Begun, or begun anew after the group was divided anew: always between two transactions.
                assert message.offset in _SEQUENCES, f"the group was at {message.offset}, inside of a transaction"
                taken, sequence = [], _SEQUENCES[message.offset]
            assert message.value == input_value(self._number, message.offset)
            taken.append(message)
            if len(taken) == SIZES[sequence]:
                if not self._transform(sequence):
                    return False
                if sequence + 1 == TRANSACTIONS:
                    return True
                taken = []
        raise AssertionError("there is nothing more to consume, says the client")

    def _transform(self, sequence: int) -> bool:
        """Do a transaction, again if need be; whether it is certain that it was committed."""
        while True:
            try:
                done = self._attempt(sequence)
            except _ChangedItsMind:
                continue
            except headrace.HeadraceError as error:
                # It may have been committed or not: doing it again under the same number is right in both cases.
                self._book.write(("failed", sequence, error.code))
                if not (error.retryable or error.code in _PASSING):
                    raise
                if error.code in _REASSIGNED or self._dice.random() < 0.3:
                    return False
                continue
            self._book.write((done, sequence, SIZES[sequence]))
            if self._dice.random() < 0.1:
                self._repeat(sequence)
            return True

    def _attempt(self, sequence: int) -> str:
        dice = self._dice
        undecided = dice.random() < 0.1
        with self._bus.transaction(f"tx-{self._number}", sequence=sequence, timeout=30) as transaction:
            assert not (self._fresh and transaction.already_committed), f"{sequence} is done, and its input is not"
            self._fresh = False
            for output, (topic, partition) in enumerate(OUTPUTS):
                values = output_values(self._number, sequence, output)
                if undecided:
                    values = [b"aborted " + value for value in values]
                if len(values) > 1 and dice.random() < 0.5:
                    transaction.publish_many(topic, values, partition=partition)
                else:
                    for value in values:
                        transaction.publish(topic, value, partition=partition)
            if dice.random() < 0.02:
                time.sleep(dice.uniform(0, 0.1))
            transaction.commit_positions(self._subscription)
            if undecided and not transaction.already_committed:
                raise _ChangedItsMind
        return "repeated" if transaction.already_committed else "committed"

    def _repeat(self, sequence: int) -> None:
        """What was committed is not done again."""
        with self._bus.transaction(f"tx-{self._number}", sequence=sequence) as transaction:
            assert transaction.already_committed
            transaction.publish("out-a", b"doubled", partition=0)


def watch(life: int, seed: int, url: str, book: str) -> None:
    """Read all that is produced, and write it down: nothing of it may ever be taken back."""
    del life, seed
    seen = Book(book)
    bus = headrace.connect(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
    for batch in bus.subscribe(*dict(OUTPUTS)).batches():
        seen.write(
            *(
                (batch.topic, batch.partition, offset, mark(value))
                for offset, value in zip(batch.offsets, batch.values, strict=True)
            )
        )


def hesitate(url: str, book: str, permission: str) -> None:
    """Consume two messages, and commit what was made of them only when there is a file that permits it."""
    lines = Book(book)
    bus = headrace.connect(url, timeout=_TIMEOUT_S)
    subscription = bus.subscribe("hesitant", group="hesitant", commit="manual", session_timeout=SESSION_S)
    messages = iter(subscription)
    try:
        with bus.transaction("hesitant") as transaction:
            for message in (next(messages), next(messages)):
                transaction.publish("made", message.value)
            lines.write(("consumed",))
            while not os.path.exists(permission):
                time.sleep(0.01)
            transaction.commit_positions(subscription)
    except headrace.HeadraceError as error:
        lines.write((error.code,))
    else:
        lines.write(("committed",))
    time.sleep(3600)  # to be killed
