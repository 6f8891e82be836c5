"""`headrace tenant`: manage tenants, which share a broker without seeing each other."""

import argparse
from typing import Any

import msgspec

from headrace.cli.arguments import command_maker, completes, count, size
from headrace.cli.connection import add_connection, connected
from headrace.cli.setting_options import size_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, table
from headrace.cli.terminal.watch import add_watch
from headrace.model.tenant import RATES, TenantQuotas, TenantUsage, given_quotas

_QUOTAS = ", ".join(TenantQuotas.__struct_fields__)

_CREATE = """\
examples:
  headrace tenant create acme
  headrace tenant create acme --description "A customer" --quota topics=100 --quota bytes_in=10MB

Quotas: topics, partitions, subscriptions, groups, connections, transactions,
staged_bytes, schedules, routes, webhooks, stored_bytes, pending_messages; and per second
messages_in, bytes_in, messages_out, bytes_out: who is faster is made to wait. Where a
tenant has no quota, the broker's setting tenant_quotas counts.
"""

_LIST = """\
examples:
  headrace tenant list
  headrace tenant list --json

While security is off, tenants may be used without being created; those that have
something are listed, too.
"""

_DESCRIBE = """\
examples:
  headrace tenant describe acme
  headrace tenant describe

Without a name it is the tenant of the connection.
"""

_USAGE = """\
examples:
  headrace tenant usage acme
  headrace tenant usage acme --watch
  headrace tenant usage --json

Stored bytes and pending messages are measured; everything else is counted as it changes.
"""

_ALTER = """\
examples:
  headrace tenant alter acme --quota topics=200
  headrace tenant alter acme --quota bytes_in=none --description "A former customer"

Sessions follow at once. What there is beyond a quota stays; no more can be made.
"""

_DELETE = """\
examples:
  headrace tenant delete acme
  headrace tenant delete acme --force

A tenant that has something is deleted with --force only: its connections end, and its
topics with their messages, groups, subscriptions, schedules, routes and transactions
are deleted. A deletion that was begun goes on, also after a crash of the broker.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace tenant`."""
    parser.epilog = "`headrace tenant COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    creating = make("create", create, "create a tenant", _CREATE)
    creating.add_argument("name", metavar="NAME", help="the name of the tenant")
    creating.add_argument("--exist-ok", action="store_true", help="accept a tenant of that name that is there already")
    listing = make("list", list_tenants, "list tenants", _LIST)
    listing.add_argument("--names", action="store_true", help="print only the names")
    describing = make("describe", describe, "print a tenant's quotas and what it uses", _DESCRIBE)
    using = make("usage", usage, "print what a tenant uses", _USAGE)
    altering = make("alter", alter, "change the description or quotas of a tenant", _ALTER)
    deleting = make("delete", delete, "delete a tenant", _DELETE)
    deleting.add_argument("--force", action="store_true", help="with all that it has")
    for each in (altering, deleting):
        completes(each.add_argument("name", metavar="NAME", help="the name of the tenant"), "tenant")
    for each in (describing, using):
        completes(each.add_argument("name", metavar="NAME", nargs="?", help="default: the connection's"), "tenant")
    for each in (creating, altering):
        each.add_argument("--description", metavar="TEXT", help="one line about it")
        each.add_argument(
            "--quota", dest="quotas", metavar="NAME=N", action="append", type=_quota, default=[],
            help="a quota; `none` removes one; may be repeated",
        )  # fmt: skip
    add_watch(listing, using)
    for each in (creating, listing, describing, using, altering, deleting):
        add_connection(each)


def _quota(text: str) -> tuple[str, int | None]:
    name, equals, number = text.partition("=")
    if not equals or name not in TenantQuotas.__struct_fields__:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=N with one of {_QUOTAS}")
    if number == "none":
        return name, None
    return name, size(number) if "bytes" in name else count(number)


def create(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Create a tenant."""
    quotas = {name: quota for name, quota in given.quotas if quota is not None}
    with connected(given, out) as bus:
        info = bus.tenants.create(
            given.name, description=given.description or "", quotas=quotas, exist_ok=given.exist_ok
        )
    out.tell(_content(info), f"created {info.tenant}")
    return 0


def list_tenants(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print tenants, one per line."""
    with connected(given, out) as bus:
        found = bus.tenants.list()
    if out.json:
        for one in found:
            out.tell(msgspec.structs.asdict(one))
        return 0
    if given.names:
        out.tell({}, *(one.tenant for one in found))
        return 0
    rows = [(one.tenant, f"{one.topics:,}", f"{one.connections:,}", one.description) for one in found]
    out.tell({}, *table(("tenant", "topics", "connections", "description"), *rows))
    return 0


def describe(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print a tenant."""
    with connected(given, out) as bus:
        info = bus.tenants.describe(given.name)
    lines = [info.tenant, *([info.description] if info.description else []), ""]
    out.tell(_content(info), *lines, *_usage_lines(info.limits, info.usage))
    return 0


def usage(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print what a tenant uses."""
    with connected(given, out) as bus:
        found = bus.tenants.usage(given.name)
    content = {
        "tenant": found.tenant,
        "usage": msgspec.structs.asdict(found.usage),
        "limits": given_quotas(found.limits),
        "throttled_seconds": found.throttled_us / 1e6,
    }
    lines = _usage_lines(found.limits, found.usage)
    if found.throttled_us:
        lines.append(f"its rates have made it wait for {found.throttled_us / 1e6:.1f} s")
    out.tell(content, *lines)
    return 0


def alter(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Change a tenant."""
    with connected(given, out) as bus:
        info = bus.tenants.alter(given.name, description=given.description, quotas=dict(given.quotas))
    out.tell(_content(info), f"altered {info.tenant}")
    return 0


def delete(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Delete a tenant."""
    with connected(given, out) as bus:
        bus.tenants.delete(given.name, cascade=given.force)
    out.tell({"deleted": given.name}, f"deleted {given.name}")
    return 0


def _content(info: Any) -> dict[str, Any]:
    """Return a tenant for JSON output."""
    return {
        "tenant": info.tenant,
        "description": info.description,
        "created_us": info.created_us,
        "quotas": given_quotas(info.quotas),
        "limits": given_quotas(info.limits),
        "usage": msgspec.structs.asdict(info.usage),
    }


def _usage_lines(limits: TenantQuotas, used: TenantUsage) -> list[str]:
    rows = []
    for name in TenantUsage.__struct_fields__:
        limit = getattr(limits, name, None)
        rows.append((name, _number(name, getattr(used, name)), "" if limit is None else _number(name, limit)))
    rows += [(f"{name} per second", "", _number(name, limit)) for name in RATES if (limit := getattr(limits, name))]
    return table(("resource", "used", "quota"), *rows)


def _number(name: str, number: int) -> str:
    return size_text(number) if "bytes" in name else f"{number:,}"
