"""Message input of the commands: from arguments, files or stdin."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import suppress

from headrace.cli.message_formats import GivenMessage, from_json
from headrace.cli.terminal.interrupts import Interrupts
from headrace.model.errors import InvalidArgument, MessageTooLarge
from headrace.model.limits import MESSAGE_BYTES_MAX

_STDIN = 0
_READ_BYTES = 256 << 10
_JSON_GROWTH = 8
"""Upper bound of the size of a JSON line, as a multiple of its message's size."""


def plain_values(given: argparse.Namespace, interrupts: Interrupts) -> Iterator[list[bytes]]:
    """Iterate over the values in non-empty lists, as they arrive."""
    if given.files:
        yield from ([_read_file(path, interrupts)] for path in given.files)
    elif given.values and given.values != ["-"]:
        yield [os.fsencode(value) for value in given.values]
    else:
        yield from _lines(interrupts, b"\0" if given.null_separated else b"\n", MESSAGE_BYTES_MAX)


def json_messages(interrupts: Interrupts, *, by_broker: bool = False) -> Iterator[list[GivenMessage]]:
    """Iterate over the messages in stdin's JSON lines in non-empty lists, as they arrive."""
    number = 0
    for lines in _lines(interrupts, b"\n", MESSAGE_BYTES_MAX * _JSON_GROWTH):
        messages: list[GivenMessage] = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                messages.append(from_json(line, by_broker=by_broker))
            except InvalidArgument as error:
                if messages:
                    yield messages  # the messages before the wrong line are valid
                raise InvalidArgument(f"line {number} of stdin: {error}") from error
        if messages:
            yield messages


def _lines(interrupts: Interrupts, separator: bytes, bytes_max: int) -> Iterator[list[bytes]]:
    """Iterate over stdin split at separators, as it arrives; the last piece needs no separator."""
    if sys.stdin is None:
        raise InvalidArgument("stdin is closed; give values, or --file")
    if sys.stdin.isatty() and sys.stderr is not None:
        print("Type messages, one per line; Ctrl-D ends.", file=sys.stderr)
    begun = bytearray()
    while data := _read(_STDIN, _READ_BYTES, interrupts):
        if separator not in data:
            begun += data
            if len(begun) > bytes_max:
                raise MessageTooLarge(
                    f"a message has at most {MESSAGE_BYTES_MAX} bytes; a line of stdin has more: divide it"
                )
            continue
        first, *lines, last = data.split(separator)
        yield [bytes(begun + first), *lines]
        begun = bytearray(last)
    if begun:
        yield [bytes(begun)]


def _read_file(path: str, interrupts: Interrupts) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = bytearray()
        while data := _read(fd, _READ_BYTES, interrupts):
            content += data
            if len(content) > MESSAGE_BYTES_MAX:
                raise MessageTooLarge(f"a message has at most {MESSAGE_BYTES_MAX} bytes; {path} has more: divide it")
        return bytes(content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        with suppress(OSError):
            os.close(fd)


def _read(fd: int, length: int, interrupts: Interrupts) -> bytes:
    with interrupts.released():
        return os.read(fd, length)
