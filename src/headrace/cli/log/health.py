"""`headrace log info`, `verify`, `repair` and `bench`: describe, check, repair and measure a log."""

import argparse
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.cli.bench_options import measure
from headrace.cli.message_formats import time_text
from headrace.cli.terminal.colours import paint_state
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, ProgressLine, counted, offsets_text
from headrace.embedded.log import Log
from headrace.embedded.repair import repair as repair_log
from headrace.model.message import Message
from headrace.storage.recovery import QUARANTINE, Findings, LostRange
from headrace.storage.segment import offset_in_name

EXIT_DAMAGED = 3
"""Verify found damage."""


def info(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print offsets, size, times, writer and cursors of a log."""
    with Log(given.directory, readonly=True) as log:
        content = log.info()
        oldest, newest = next(log.messages(skip_corrupt=True), None), _newest(log)
        content["oldest_timestamp"] = oldest and oldest.timestamp
        content["newest_timestamp"] = newest and newest.timestamp
        following = content["next_offset"]
        content["cursors"] = {
            name: {"offset": offset, "lag": max(following - max(offset, content["first_offset"]), 0)}
            for name, offset in content["cursors"].items()
        }
    out.tell(content, *_info_lines(content))
    return 0


def _info_lines(content: dict[str, Any]) -> Iterator[str]:
    yield f"path      {content['path']}"
    first, following = content["first_offset"], content["next_offset"]
    yield f"offsets   {f'{first} to {following - 1}' if first < following else f'none; the next is {following}'}"
    yield f"messages  {content['messages']:,}"
    yield f"bytes     {content['bytes']:,} in {counted(content['segments'], 'segment')}"
    for name in ("oldest", "newest"):
        time_us = content[f"{name}_timestamp"]
        yield f"{name}    {'-' if time_us is None else time_text(time_us)}"
    writer = "at work" if content["writer"] else "none"
    yield f"writer    {'a broker, and nobody else' if content['owner'] else writer}"
    cursors = content["cursors"]
    width = max(map(len, cursors), default=0)
    yield f"cursors   {'' if cursors else 'none'}".rstrip()
    for name, cursor in cursors.items():
        yield f"  {name:{width}}  at offset {cursor['offset']}, {cursor['lag']:,} behind"


def _newest(log: Log) -> Message | None:
    """Return the last readable message; messages before the end may be damaged or removed."""
    back = 1
    while True:
        start = max(log.next_offset - back, log.first_offset)
        last = deque(log.messages(start, skip_corrupt=True), maxlen=1)
        if last:
            return last[0]
        if start == log.first_offset:
            return None
        back *= 16


def verify(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Check every byte of a log and print the damage."""
    with Log(given.directory, readonly=True) as log, ProgressLine("verifying", _segment_bytes(log.path)) as progress:
        path, findings = log.path, log.verify(progress)
    earlier = [lost for lost in findings.lost if lost.repaired]
    damaged = [lost for lost in findings.lost if not lost.repaired]
    sound = findings.sound
    content = {
        "path": path,
        "sound": sound,
        "segments": findings.segments,
        "batches": findings.batches,
        "messages": findings.messages,
        "bytes": findings.bytes,
        "damaged": [lost_content(lost) for lost in damaged],
        "damaged_headers": findings.headers,
        "damaged_record": findings.record,
        "torn_bytes": findings.torn_bytes,
        "lost_earlier": [lost_content(lost) for lost in earlier],
    }
    checked = f"{counted(findings.messages, 'message')} in {counted(findings.segments, 'segment')}"
    lines = [f"{path}: {checked}, {counted(findings.bytes, 'byte')} checked"]
    lines += [f"damaged: {lost_text(lost)}" for lost in damaged]
    lines += [f"damaged: the header of {header}" for header in findings.headers]
    lines += record_lines(findings)
    if findings.torn_bytes:
        lines.append(
            f"torn: {counted(findings.torn_bytes, 'byte')} of an unfinished write at offset {findings.torn_at}"
        )
    lines += [f"lost earlier: {offsets_text(lost.first_offset, lost.next_offset)}" for lost in earlier]
    lines.append(paint_state("sound" if sound else "DAMAGED; `headrace log repair` repairs the log"))
    out.tell(content, *lines)
    return 0 if sound else EXIT_DAMAGED


def repair(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Quarantine damage, repair the log, and print what was done."""
    path = os.path.abspath(given.directory)
    with ProgressLine("repairing", _segment_bytes(path) if os.path.isdir(path) else None) as progress:
        findings = repair_log(path, progress)
    quarantine = f"{path}/{QUARANTINE}"
    changed = not findings.sound
    content = {
        "path": path,
        "changed": changed,
        "messages": findings.messages,
        "bytes": findings.bytes,
        "lost": [{**lost_content(lost), "kept_in": lost.kept_in} for lost in findings.lost],
        "cut_bytes": findings.torn_bytes,
        "cut_at": findings.torn_at,
        "cut_kept_in": findings.torn_kept_in,
        "rewritten_headers": findings.headers,
        "rewritten_record": findings.record,
        "quarantine": quarantine if changed else None,
    }
    lines = [f"{path}: {counted(findings.messages, 'message')}, {counted(findings.bytes, 'byte')} checked"]
    for lost in findings.lost:
        lines.append(f"lost: {lost_text(lost)}")
        lines += [f"  the damaged bytes are kept in {lost.kept_in}"] if lost.kept_in else []
    if findings.torn_bytes:
        lines.append(f"cut: {counted(findings.torn_bytes, 'byte')} of an unfinished write at offset {findings.torn_at}")
    lines += [f"rewritten: the header of {header}" for header in findings.headers]
    lines += [f"rewritten: {findings.record}, from the segments"] if findings.record else []
    lines.append(f"repaired; copies of what was replaced are in {quarantine}" if changed else "nothing to repair")
    out.tell(content, *lines)
    return 0


def record_lines(findings: Findings) -> list[str]:
    """Return a line about the record of a log, if it is missing or damaged."""
    if findings.record is None:
        return []
    return [
        f"damaged: {findings.record} is missing or cannot be read, so it is not known which messages were trimmed: "
        "some of the oldest segment may be there again"
    ]


def lost_content(lost: LostRange) -> dict[str, Any]:
    """Return lost messages for JSON output."""
    content: dict[str, Any] = msgspec.to_builtins(lost)
    del content["kept_in"], content["repaired"]
    return {**content, "messages": lost.next_offset - lost.first_offset}


def lost_text(lost: LostRange) -> str:
    """Format lost messages for people."""
    return f"{offsets_text(lost.first_offset, lost.next_offset)} ({lost.path} at byte {lost.position}: {lost.reason})"


def _segment_bytes(path: str) -> int:
    with os.scandir(path) as entries:
        return sum(entry.stat().st_size for entry in entries if offset_in_name(entry.name) is not None)


def bench(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Measure the performance of a log in a directory."""
    from headrace.bench.run import run

    return measure(run, given, out)
