"""`headrace auth role`: list, set and remove roles."""

import argparse
from collections.abc import Callable, Iterator, Sequence

import msgspec

from headrace.cli.arguments import Command, CommandParser, command_maker
from headrace.cli.connection import add_connection, connected
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, table
from headrace.model.security_requests import ANY, Binding, Grant, SecurityInfo

_LIST = """\
examples:
  headrace auth role list
  headrace auth role list --json

Prints the built-in roles, your own, and to whom they are bound.
"""

_SET = """\
examples:
  headrace auth role set bookkeeper consume:topic:orders.*,bills.* consume:group:audit-*
  headrace auth role set billing lease:subscription:orders/billing publish:topic:bills

Creates a role, or replaces what it grants. A grant is VERBS:RESOURCE:PATTERNS, each a
list with commas. Verbs: describe, publish, consume, lease, edit-own, edit-any, create,
alter, delete, schedule, route, serve, request, administer. Resources: topic, group,
subscription, transaction, schedule, subject, route, service, webhook, broker,
security. In patterns `*` stands for any characters, `?` for one.
"""

_REMOVE = """\
example:
  headrace auth role remove bookkeeper

Its bindings are removed with it.
"""


def add_role_commands(make: Callable[[str, Command | None, str, str], CommandParser]) -> None:
    """Add the commands to those of `headrace auth`."""
    parser = make("role", None, "list, set and remove roles", "`headrace auth role COMMAND --help` explains a command.")
    nested = command_maker(parser)
    listing = nested("list", list_roles, "list roles and bindings", _LIST)
    setting = nested("set", set_role, "create a role, or replace its grants", _SET)
    setting.add_argument("name", metavar="ROLE", help="the role")
    setting.add_argument("grants", metavar="GRANT", type=grant, nargs="+", help="VERBS:RESOURCE:PATTERNS")
    removing = nested("remove", remove_role, "remove a role", _REMOVE)
    removing.add_argument("name", metavar="ROLE", help="the role")
    for each in (listing, setting, removing):
        add_connection(each)


def grant(text: str) -> Grant:
    """Parse a grant.

    >>> grant("publish,consume:topic:orders.*").verbs
    ['publish', 'consume']
    """
    verbs, _, rest = text.partition(":")
    resource, _, patterns = rest.partition(":")
    if not (verbs and resource and all(patterns.split(","))):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no grant; write VERBS:RESOURCE:PATTERNS, as publish:topic:orders.*, with * for all names"
        )
    return Grant(verbs.split(","), resource, patterns.split(","))


def claim(text: str) -> tuple[str, str]:
    """Parse a claim of a JWT and the pattern of its value.

    >>> claim("groups=ops-*")
    ('groups', 'ops-*')
    """
    name, equals, pattern = text.partition("=")
    if not (name and equals and pattern):
        raise argparse.ArgumentTypeError(f"{text!r} is no claim; write NAME=VALUE")
    return name, pattern


def list_roles(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print roles, and to whom they are bound."""
    with connected(given, out) as bus:
        info = bus.auth.describe()
    content = {
        "version": info.version,
        "enabled": info.enabled,
        "roles": [msgspec.structs.asdict(role) | {"grants": msgspec.to_builtins(role.grants)} for role in info.roles],
        "bindings": [msgspec.structs.asdict(one) for one in info.bindings],
    }
    out.tell(content, *_description(info))
    return 0


def set_role(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Create or replace a role."""
    with connected(given, out) as bus:
        bus.auth.set_role(given.name, given.grants)
    out.tell({"role": given.name, "grants": msgspec.to_builtins(given.grants)}, f"the role {given.name} is set")
    return 0


def remove_role(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Remove a role."""
    with connected(given, out) as bus:
        bus.auth.remove_role(given.name)
    out.tell({"removed": given.name}, f"removed the role {given.name}")
    return 0


def _description(info: SecurityInfo) -> Iterator[str]:
    yield f"security is {'enabled' if info.enabled else 'off'}"
    yield ""
    rows = [
        (role.name, "built in" if role.is_built_in else "", role.description or "; ".join(map(_told, role.grants)))
        for role in info.roles
    ]
    yield from table(("role", "", "grants"), *rows)
    if info.bindings:
        yield ""
        yield from binding_table(info.bindings)


def binding_table(bindings: Sequence[Binding]) -> list[str]:
    """What is told of bindings."""
    return table(("role", "bound to", "tenant"), *map(_bound, bindings))


def _told(one: Grant) -> str:
    return f"{','.join(one.verbs)}:{one.resource}:{','.join(one.patterns)}"


def _bound(binding: Binding) -> tuple[str, str, str]:
    claims = [f"claim {name}={pattern}" for name, pattern in sorted(binding.claims.items())]
    who = " and ".join([*([binding.identity] if binding.identity else []), *claims])
    return binding.role, who, "all" if binding.tenant == ANY else binding.tenant
