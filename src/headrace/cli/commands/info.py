"""`headrace info`: describes a broker."""

import argparse
from collections.abc import Iterator

from headrace.cli.connection import add_connection, broker_place, connected
from headrace.cli.message_formats import time_text
from headrace.cli.setting_options import setting_text
from headrace.cli.terminal.histogram import span_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, table
from headrace.cli.terminal.watch import add_watch
from headrace.model.requests import BrokerInfo

_EPILOG = """\
examples:
  headrace info
  headrace info --watch
  headrace info --json | jq .memory_bytes

Prints the broker's version, addresses, data directory, counts and limits, and the
memory of its process. The broker tells paths only to clients on its own machine.
"""
_COUNTS = {
    "topics": "topics",
    "partitions_open": "open partitions",
    "groups": "groups",
    "subscriptions": "leased subscriptions",
    "schedules": "schedules",
    "transactions_open": "open transactions",
    "connections": "connections",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace info`."""
    parser.epilog = _EPILOG
    add_watch(parser)
    add_connection(parser)
    parser.set_defaults(run=info)


def info(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the description of a broker."""
    where = broker_place(given)
    with connected(given, out) as bus:
        found = bus.info()
    content = {name: getattr(found, name) for name in found.__struct_fields__}
    uptime_s = max(found.time_us - found.started_us, 0) / 1e6
    out.tell({"address": where, "uptime_seconds": uptime_s, **content}, *_lines(found, where))
    return 0


def _lines(found: BrokerInfo, where: str) -> Iterator[str]:
    yield f"broker   {found.broker_id}, Headrace {found.version}"
    yield f"address  {where}"
    if found.listening:
        yield f"listens  {', '.join(found.listening)}"
    if found.data:  # the broker tells it only on its own machine
        yield f"data     {found.data}"
    yield f"process  {found.pid}" if found.pid else "process  -"
    yield f"uptime   {span_text(max(found.time_us - found.started_us, 0))}, since {time_text(found.started_us)}"
    if found.memory_bytes:
        yield f"memory   {found.memory_bytes / (1 << 20):,.1f} MiB"
    yield ""
    yield from table(("there are", ""), *((text, getattr(found, name)) for name, text in _COUNTS.items()))
    if found.limits:
        yield ""
        yield from table(("limit", "value"), *((name, setting_text(name, it)) for name, it in found.limits.items()))
