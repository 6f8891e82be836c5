"""`headrace log read` and `headrace log tail`: print messages of a log, to the end or as they arrive."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from headrace.cli.message_formats import Form, as_json, as_text, as_value
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, offsets_text
from headrace.embedded.cursor import Cursor
from headrace.embedded.log import Log
from headrace.model.errors import HeadraceError, OffsetOutOfRange
from headrace.model.message import Message

_COMMIT_EVERY_S = 0.5
_LOOK_EVERY_S = 0.25
"""How often a waiting tail checks for signals and for a closed output, in seconds."""


class MessagePrinter:
    """Prints messages, and moves the cursor, if there is one, past the printed ones."""

    def __init__(self, out: Output, form: Form, cursor: Cursor | None, start: int) -> None:
        self._out = out
        self._form = form
        self._cursor = cursor
        self.offset = start
        """The next offset to read: every message before it was added, or is damaged or removed."""
        self._printed = start
        self._commit_s = time.monotonic() + _COMMIT_EVERY_S

    def add(self, message: Message) -> None:
        """Queue a message for output; the next `flush` prints it at the latest."""
        self._out.add(self._form(message))
        self.offset = message.offset + 1
        if self._out.full:
            self.flush()
            if time.monotonic() >= self._commit_s:
                self.commit()

    def flush(self) -> None:
        """Print all queued messages."""
        self._out.flush()
        self._printed = self.offset

    def commit(self) -> None:
        """Store the cursor's position durably."""
        if self._cursor is not None and self._printed != self._cursor.committed:
            self._cursor.commit(self._printed)
        self._commit_s = time.monotonic() + _COMMIT_EVERY_S


def read(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print messages up to the current end of the log."""
    with (
        Log(given.directory, readonly=True) as log,
        _cursor(log, given.cursor) as cursor,
        _delivery(given, out, cursor, _start(log, given, cursor, log.first_offset)) as delivery,
    ):
        end = log.next_offset if given.until is None else min(given.until, log.next_offset)
        messages = log.messages(delivery.offset, until=end, skip_corrupt=given.skip_corrupt)
        if _deliver(messages, given.limit, delivery) != given.limit:
            delivery.offset = max(delivery.offset, end)
    return 0


def tail(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Print messages as they arrive."""
    with (
        Log(given.directory, readonly=True) as log,
        _cursor(log, given.cursor) as cursor,
        _delivery(given, out, cursor, _start(log, given, cursor, log.next_offset)) as delivery,
    ):
        left = given.limit
        while left != 0:
            end = log.next_offset
            messages = log.messages(delivery.offset, skip_corrupt=given.skip_corrupt)
            try:
                count = _deliver(messages, left, delivery)
            except OffsetOutOfRange:
                if delivery.offset >= log.first_offset:
                    raise
                _pass_over(log, delivery, out)
                continue
            if count != left:
                delivery.offset = max(delivery.offset, end)
            left = None if left is None else left - count
            delivery.flush()
            delivery.commit()
            if left != 0 and not _wait(log, delivery.offset, given.timeout, out, interrupts):
                break
    return 0


def _deliver(messages: Iterator[Message], limit: int | None, delivery: MessagePrinter) -> int:
    """Print messages up to a limit; returns how many were printed."""
    count = 0
    for message in islice(messages, limit):
        delivery.add(message)
        count += 1
    return count


def _pass_over(log: Log, delivery: MessagePrinter, out: Output) -> None:
    """Continue at the first remaining message after retention removed unread ones."""
    first = log.first_offset
    out.note(f"{offsets_text(delivery.offset, first)} removed from the log before being read")
    delivery.offset = first


def _wait(log: Log, offset: int, timeout_s: float | None, out: Output, interrupts: Interrupts) -> bool:
    """Wait for a message; returns False after the timeout or when the output is closed."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left = _LOOK_EVERY_S if deadline is None else min(deadline - time.monotonic(), _LOOK_EVERY_S)
        with interrupts.held():
            grown = log.wait(offset, max(left, 0.0))
        interrupts.check()
        if grown or left <= 0 or out.closed:
            return grown and not out.closed


def _start(log: Log, given: argparse.Namespace, cursor: Cursor | None, otherwise: int) -> int:
    first, following = log.first_offset, log.next_offset
    if given.time is not None:
        return log.find_time(given.time)
    if given.last is not None:
        return max(following - int(given.last), first)
    if given.offset is not None:
        start = int(given.offset)
    else:
        start = otherwise if cursor is None else max(cursor.committed, first)
    if not first <= start <= following:
        whose = "" if given.offset is not None or cursor is None else f", where cursor {cursor.name} stands"
        has = f"has offsets {first} to {following - 1}" if first < following else "is empty"
        raise OffsetOutOfRange(f"there is no offset {start}{whose}; the log {has}, the next will be {following}")
    return start


@contextmanager
def _cursor(log: Log, name: str | None) -> Iterator[Cursor | None]:
    if name is None:
        yield None
        return
    with log.cursor(name) as cursor:
        yield cursor


@contextmanager
def _delivery(given: argparse.Namespace, out: Output, cursor: Cursor | None, start: int) -> Iterator[MessagePrinter]:
    """Yield a delivery, and commit what was printed at the end of the block, also after an error."""
    form: Form = as_json if given.json else as_text
    if given.values:
        form = as_value(b"\0" if given.null_separated else b"\n")
    delivery = MessagePrinter(out, form, cursor, start)
    try:
        yield delivery
        delivery.flush()
    except HeadraceError:
        delivery.flush()  # what could be read
        raise
    finally:
        delivery.commit()
