"""`headrace auth token`: create, list and revoke tokens."""

import argparse
import os
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec

from headrace.cli.arguments import Command, CommandParser, command_maker, completes, duration
from headrace.cli.commands.auth_roles import grant
from headrace.cli.connection import add_connection, connected, in_tenant
from headrace.cli.message_formats import time_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, table
from headrace.model.errors import InvalidArgument
from headrace.model.security_requests import TokenCreated, TokenInfo

_CREATE = """\
examples:
  headrace auth token create sensor-1 --in-tenant plant --expires 90d
  headrace auth token create ci --save ci.token --description "builds"
  headrace auth token create backup --scope consume:topic:*

The token is shown once; the broker stores a hash of it. What it may be used for is what
the roles of its identity allow: `headrace auth bind ROLE IDENTITY` gives it one. A
scope VERBS:RESOURCE:PATTERNS leaves only a part of that.
"""

_LIST = """\
examples:
  headrace auth token list
  headrace auth token list --identity ci --json
"""

_REVOKE = """\
example:
  headrace auth token revoke 0123456789ab

Connections that use the token end at once. The id is the part between the underscores.
"""

_OPEN_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def add_token_commands(make: Callable[[str, Command | None, str, str], CommandParser]) -> None:
    """Add the commands to those of `headrace auth`."""
    parser = make("token", None, "create, list and revoke tokens", "`headrace auth token COMMAND --help` explains one.")
    nested = command_maker(parser)
    creating = nested("create", create, "create a token", _CREATE)
    creating.add_argument("identity", metavar="IDENTITY", help="the name of who uses it")
    creating.add_argument(
        "--in-tenant", metavar="NAME", default="", help="the tenant that it belongs to (default: any)"
    )
    creating.add_argument("--expires", metavar="TIME", type=duration, help="how long it lasts (default: for ever)")
    creating.add_argument("--scope", metavar="GRANT", type=grant, action="append", help="VERBS:RESOURCE:PATTERNS")
    creating.add_argument("--description", metavar="TEXT", default="", help="what it is for")
    saving = creating.add_argument("--save", metavar="FILE", help="write it to a file, which only its owner can read")
    completes(saving, "file")
    add_force(creating)
    listing = nested("list", list_tokens, "list tokens", _LIST)
    listing.add_argument("--identity", metavar="NAME", default="", help="only those of this identity")
    revoking = nested("revoke", revoke, "revoke tokens", _REVOKE)
    revoking.add_argument("ids", metavar="ID", nargs="+", help="the id of a token")
    for each in (creating, listing, revoking):
        add_connection(each)


def add_force(parser: CommandParser) -> None:
    """Add the option --force, which lets --save replace a file."""
    parser.add_argument("--force", action="store_true", help="let --save replace a file")


def check_new_file(given: argparse.Namespace) -> None:
    """Refuse a file for a token that is there already, unless --force is given."""
    if given.save and not given.force and os.path.lexists(os.path.expanduser(given.save)):
        raise InvalidArgument(
            f"{given.save} is there already: save to another file, or give --force to replace it. A token that it has "
            "stays valid: `headrace auth token revoke ID` ends it"
        )


def create(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Create a token and show it, or write it to a file."""
    check_new_file(given)
    tenant = in_tenant(given)
    lasts = None if given.expires is None else timedelta(seconds=given.expires)
    with connected(given, out) as bus:
        created = bus.auth.create_token(
            given.identity,
            tenant=tenant,
            scopes=given.scope or [],
            expires=lasts,
            description=given.description,
        )
    saved = write_token(given.save, created.token)
    told = {"token_file": saved} if saved else {"token": created.token}
    out.tell({**_content(created.info), **told}, *token_lines(created, saved))
    return 0


def list_tokens(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print tokens, without their secrets."""
    with connected(given, out) as bus:
        found = bus.auth.tokens(given.identity)
    if out.json:
        for info in found:
            out.tell(_content(info))
    elif not found:
        out.note("there are no tokens; `headrace auth token create IDENTITY` makes one")
    else:
        out.tell({}, *token_table(found))
    return 0


def revoke(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Revoke tokens."""
    with connected(given, out) as bus:
        for token_id in given.ids:
            info = bus.auth.revoke(token_id)
            out.tell(_content(info), f"revoked {token_id} of {info.identity}")
    return 0


def write_token(path: str | None, token: str) -> str:
    """Write a token to a file that only its owner can read; returns the absolute path, empty without one."""
    if not path:
        return ""
    path = os.path.abspath(os.path.expanduser(path))
    with open(os.open(path, _OPEN_FLAGS, 0o600), "w", encoding="ascii") as file:
        os.fchmod(file.fileno(), 0o600)  # it may have been there before
        file.write(f"{token}\n")
    return path


def token_lines(created: TokenCreated, saved: str) -> list[str]:
    """What is told of a new token."""
    lines = [f"identity  {created.info.identity}", f"id        {created.info.id}"]
    lines += [f"expires   {time_text(created.info.expires_us)}"] if created.info.expires_us else []
    if saved:
        return [*lines, f"token     in {saved}"]
    return [*lines, f"token     {created.token}", "", "The token is shown only now: store it in a safe place."]


def token_table(found: Sequence[TokenInfo]) -> list[str]:
    """What is told of tokens, without their secrets."""
    return table(("id", "identity", "tenant", "created", "expires", "last used", "description"), *map(_row, found))


def _content(info: TokenInfo) -> dict[str, object]:
    content: dict[str, object] = msgspec.to_builtins(info)
    return {**{name: getattr(info, name) for name in ("tenant", "expires_us", "revoked_us", "used_us")}, **content}


def _row(info: TokenInfo) -> tuple[object, ...]:
    ends = "revoked" if info.revoked_us else time_text(info.expires_us) if info.expires_us else "never"
    used = time_text(info.used_us) if info.used_us else "-"
    return info.id, info.identity, info.tenant or "any", time_text(info.created_us), ends, used, info.description or "-"
