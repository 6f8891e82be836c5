"""`headrace log append`: appends messages from arguments, files or stdin to a log."""

import argparse
import os
from collections.abc import Iterator

import msgspec

from headrace.cli.input import json_messages, plain_values
from headrace.cli.message_formats import GivenMessage
from headrace.cli.terminal.interrupts import Interrupted, Interrupts
from headrace.cli.terminal.output import Output, counted, offsets_text
from headrace.embedded import process_shared
from headrace.embedded.log import Log
from headrace.model.errors import HeadraceError
from headrace.model.headers import headers_from_pairs


class AppendResult(msgspec.Struct, kw_only=True):
    """The result of an append."""

    appended: int
    first_offset: int
    next_offset: int
    synced: bool
    """Whether all appended messages are synced to the disk."""
    interrupted: bool


def append(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Append messages, sync them, and print their offsets, also when an error or a signal ends the command early."""
    with interrupts.held():  # a signal interrupts only the wait for input
        log = Log(given.directory, sync_every=given.sync_every, compression=given.compression)
        _tell_recovery(log, out)
        first = log.next_offset
        early_end = _append_all(log, given, interrupts)
        following, failure = _close(log)
    outcome = AppendResult(
        appended=following - first,
        first_offset=first,
        next_offset=following,
        synced=failure is None,
        interrupted=isinstance(early_end, Interrupted),
    )
    problem = early_end or failure
    if out.json or outcome.appended or outcome.interrupted or problem is None:
        out.tell(msgspec.to_builtins(outcome), _text(outcome))
    if problem is not None:
        raise problem
    return 0


def _tell_recovery(log: Log, out: Output) -> None:
    found = log.recovery
    if found.torn_bytes:
        copied = " (the disk was full: no copy was kept)" if found.uncopied_bytes else ""
        out.note(f"cut off {counted(found.torn_bytes, 'byte')} of a write that the last writer did not finish{copied}")
    for lost in found.lost:
        out.note(f"{offsets_text(lost.first_offset, lost.next_offset)} lost: {lost.reason}")


def _text(outcome: AppendResult) -> str:
    text = f"appended {counted(outcome.appended, 'message')}"
    if outcome.appended:
        text += f", {offsets_text(outcome.first_offset, outcome.next_offset)}"
        text += "" if outcome.synced else ", not synced"
    if outcome.interrupted:
        text = f"interrupted; {text}{', all synced' if outcome.appended and outcome.synced else ''}"
    return text


def _append_all(log: Log, given: argparse.Namespace, interrupts: Interrupts) -> BaseException | None:
    """Append all messages; returns the error or signal that ended it early."""
    try:
        for messages in _given_messages(given, interrupts):
            if isinstance(messages[0], bytes):
                log.append_many(messages)
                continue
            for message in messages:
                assert isinstance(message, GivenMessage)
                log.append(message.value, message.key, message.headers, message.timestamp)
    except (HeadraceError, OSError, Interrupted) as error:
        return error
    return None


def _close(log: Log) -> tuple[int, HeadraceError | None]:
    """Sync and close the log; returns its end offset, and the error if there was one."""
    try:
        log.flush()
        following = log.next_offset
        log.close()
    except HeadraceError as error:
        process_shared.closed(log)  # otherwise the log would be closed again when the process ends
        with Log(log.path, readonly=True) as written:
            return written.next_offset, error
    return following, None


def _given_messages(given: argparse.Namespace, interrupts: Interrupts) -> Iterator[list[bytes] | list[GivenMessage]]:
    """Iterate over the messages in non-empty lists, as they arrive."""
    if given.json_lines:
        yield from json_messages(interrupts)
        return
    key = None if given.key is None else os.fsencode(given.key)
    headers = headers_from_pairs(given.headers or ())
    for values in plain_values(given, interrupts):
        if key is None and headers is None and given.timestamp is None:
            yield values
        else:
            yield [GivenMessage(value, key, headers, given.timestamp) for value in values]
