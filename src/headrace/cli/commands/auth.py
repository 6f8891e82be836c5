"""`headrace auth`: who clients and brokers are, and what identities may do."""

import argparse
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace.cli.arguments import CommandParser, command_maker
from headrace.cli.commands.auth_certificates import add_certificate_command, default_directory
from headrace.cli.commands.auth_roles import add_role_commands, binding_table, claim
from headrace.cli.commands.auth_tokens import (
    add_force,
    add_token_commands,
    check_new_file,
    token_lines,
    token_table,
    write_token,
)
from headrace.cli.connection import add_connection, broker_place, connected, in_tenant
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output
from headrace.model.errors import InvalidArgument
from headrace.model.security_requests import ANY, Binding, TokenInfo

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

EXIT_FORBIDDEN = 1
EXIT_REFUSED = 1

_INIT = """\
examples:
  headrace auth init
  headrace auth init --save ~/admin.token
  headrace auth init --no-certificates

Run it once, as the user who runs the broker, on its machine. It makes a token for an
administrator and, if pip install 'headrace[security]' was run, a CA for development
with a certificate for the broker; then it enables security: from then on every client
needs credentials, also on 127.0.0.1, but for the broker's own user on its Unix socket.
The token is shown once, or written to a file. Run again it makes another token: those
before stay valid until `headrace auth token revoke ID`.

Tokens and bindings that somebody made before would count from then on: it shows them
and stops, unless you say with --keep that they are right.
"""

_CAN = """\
examples:
  headrace auth can ada publish topic orders
  headrace auth can ada lease subscription orders/workers --in-tenant acme
  headrace auth can ci create topic builds.eu --claim groups=dev

Prints whether an identity, or a token by its id, may do something, and which rule
decides; exits with 1 if it may not.
"""

_BIND = """\
examples:
  headrace auth bind publisher 'sensor-*'
  headrace auth bind operator --claim groups=ops
  headrace auth bind consumer ada --in-tenant acme

Gives a role to identities: `*` in a name stands for any characters, `?` for one.
`headrace auth role list` shows roles and bindings.
"""

_UNBIND = """\
example:
  headrace auth unbind publisher 'sensor-*'

Takes a role away again; give what `headrace auth bind` was given.
"""

_WHO = """\
example:
  headrace auth whoami

Prints who the broker takes you for, and your roles.
"""

_ENABLE = """\
examples:
  headrace auth enable
  headrace auth enable --keep

From then on every client needs credentials, and may do what its roles allow. `headrace
auth init` makes a token for an administrator first. Tokens and bindings that there are
count from then on: it shows them and stops, unless you say with --keep that they are right.
"""

_DISABLE = """\
example:
  headrace auth disable

From then on everybody who reaches the broker can do everything. Roles, bindings and
tokens stay.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace auth`."""
    parser.epilog = "`headrace auth COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    starting = make("init", init, "make an administrator's token, and enable security", _INIT)
    starting.add_argument(
        "--identity", metavar="NAME", default="admin", help="the administrator's name (default: admin)"
    )
    starting.add_argument("--save", metavar="FILE", help="write the token to a file, which only its owner can read")
    add_force(starting)
    starting.add_argument("--no-certificates", action="store_true", help="make no CA for development")
    add_token_commands(make)
    add_role_commands(make)
    _add_binding(make("bind", bind, "give a role to identities", _BIND))
    _add_binding(make("unbind", unbind, "take a role from identities", _UNBIND))
    asking = make("can", can, "explain whether an identity may do something", _CAN)
    asking.add_argument("who", metavar="WHO", help="an identity, or the id of a token")
    asking.add_argument("verb", metavar="VERB", help="what it would do, such as publish")
    asking.add_argument("resource", metavar="RESOURCE", help="the kind of thing, such as topic")
    asking.add_argument("name", metavar="NAME", nargs="?", default="", help="its name; of a subscription TOPIC/NAME")
    asking.add_argument("--in-tenant", metavar="NAME", default="", help="the tenant of the thing")
    asking.add_argument("--claim", metavar="NAME=VALUE", type=claim, action="append", help="a claim of its JWT")
    telling = make("whoami", who_am_i, "print who the broker takes you for", _WHO)
    enabling = make("enable", enable, "require credentials and roles", _ENABLE)
    disabling = make("disable", disable, "let everybody do everything", _DISABLE)
    for each in (starting, enabling):
        each.add_argument("--keep", action="store_true", help="accept the tokens and bindings that there are")
    for each in (starting, asking, telling, enabling, disabling):
        add_connection(each)
    add_certificate_command(make)


def _add_binding(parser: CommandParser) -> None:
    parser.add_argument("role", metavar="ROLE", help="the role")
    parser.add_argument("who", metavar="WHO", nargs="?", default="", help="an identity, or a pattern of names")
    parser.add_argument("--claim", metavar="NAME=VALUE", type=claim, action="append", help="a claim of JWTs")
    parser.add_argument("--in-tenant", metavar="NAME", default=ANY, help="where the role counts (default: everywhere)")
    add_connection(parser)


def init(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Make an administrator's token and certificates for development, and enable security."""
    check_new_file(given)
    with connected(given, out) as bus:
        found = _find_dormant(bus)
        if found and not given.keep:
            return _refuse_dormant(found, out)
        files = {} if given.no_certificates else _make_certificates(out)
        created = bus.auth.create_token(given.identity, description="made by `headrace auth init`")
        bus.auth.bind("administrator", given.identity)
    saved = write_token(given.save, created.token)
    # With the new token: enabling ends connections without credentials, perhaps the one before.
    with connected(given, out, token=created.token) as bus:
        bus.auth.enable()
    content = {"identity": given.identity, "token_id": created.info.id, "enabled": True, **files}
    content |= {"token_file": saved} if saved else {"token": created.token}
    content |= found.content() if found else {}
    lines = [f"security is enabled for {broker_place(given)}", "", *found.lines(), *token_lines(created, saved), ""]
    lines += [
        "next:",
        f"  export HEADRACE_TOKEN_FILE={saved}" if saved else "  export HEADRACE_TOKEN=...   # the token above",
        "  headrace auth token create sensor-1 --in-tenant default",
        "  headrace auth bind publisher 'sensor-*'",
    ]
    if files:
        lines.append(f"  headrace serve ... --tls-certificate {files['certificate']} --tls-key {files['key']}")
    out.tell(content, *lines)
    return 0


class _Dormant(NamedTuple):
    """The tokens and bindings that begin to count when security is enabled."""

    version: int
    tokens: list[TokenInfo]
    bindings: list[Binding]

    def __bool__(self) -> bool:
        return bool(self.tokens or self.bindings)

    def content(self) -> dict[str, object]:
        """Them as JSON."""
        return {"tokens": msgspec.to_builtins(self.tokens), "bindings": msgspec.to_builtins(self.bindings)}

    def lines(self) -> list[str]:
        """Them as text; no lines if there are none."""
        lines = [*token_table(self.tokens), ""] if self.tokens else []
        return [*lines, *binding_table(self.bindings), ""] if self.bindings else lines


def _find_dormant(bus: "Bus") -> _Dormant:
    info = bus.auth.describe()
    if info.enabled:
        return _Dormant(info.version, [], [])  # they count already
    tokens = [one for one in bus.auth.tokens() if not one.revoked_us]
    usable = [one for one in tokens if not one.expires_us or one.expires_us > info.time_us]
    return _Dormant(info.version, usable, info.bindings)


def _refuse_dormant(found: _Dormant, out: Output) -> int:
    """Show what would begin to count, and what to do."""
    advice = (
        "security was not enabled: these tokens and bindings would count from then on. Revoke and unbind those that "
        "you do not know (headrace auth token revoke, headrace auth unbind), or accept them with --keep"
    )
    out.tell({"enabled": False, **found.content(), "text": advice}, *found.lines(), advice)
    return EXIT_REFUSED


def _make_certificates(out: Output) -> dict[str, str]:
    """A CA and a certificate for the broker; none if the packages for that are missing."""
    from headrace.security.development_ca import DevelopmentCa, own_names

    directory = default_directory()
    try:
        made = DevelopmentCa(directory).make_server(own_names())
    except InvalidArgument as error:
        out.note(f"no certificates were made: {error}")
        return {}
    return {"ca": made.ca, "certificate": made.certificate, "key": made.key}


def bind(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Give a role to identities."""
    claims, tenant = dict(given.claim or ()), in_tenant(given)
    with connected(given, out) as bus:
        bus.auth.bind(given.role, given.who, claims=claims, tenant=tenant)
    out.tell(_binding(given, claims), f"{_whom(given, claims)} has the role {given.role}{_where(given)}")
    return 0


def unbind(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Take a role from identities."""
    claims, tenant = dict(given.claim or ()), in_tenant(given)
    with connected(given, out) as bus:
        bus.auth.unbind(given.role, given.who, claims=claims, tenant=tenant)
    out.tell(_binding(given, claims), f"{_whom(given, claims)} has the role {given.role} no more{_where(given)}")
    return 0


def _binding(given: argparse.Namespace, claims: dict[str, str]) -> dict[str, object]:
    return {"role": given.role, "identity": given.who, "claims": claims, "tenant": given.in_tenant}


def _whom(given: argparse.Namespace, claims: dict[str, str]) -> str:
    told = [given.who] if given.who else []
    return " and ".join([*told, *(f"the claim {name}={pattern}" for name, pattern in claims.items())])


def _where(given: argparse.Namespace) -> str:
    return "" if given.in_tenant == ANY else f" in the tenant {given.in_tenant}"


def can(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Explain a decision."""
    claims, tenant = dict(given.claim or ()), in_tenant(given)
    with connected(given, out) as bus:
        told = bus.auth.can(given.who, given.verb, given.resource, given.name, tenant=tenant, claims=claims)
    out.tell(msgspec.to_builtins(told), f"{'yes' if told.allowed else 'no'}: {told.text}")
    return 0 if told.allowed else EXIT_FORBIDDEN


def who_am_i(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print who the broker takes the user for."""
    with connected(given, out) as bus:
        told = bus.auth.who_am_i()
    lines = [f"identity  {told.identity}{'' if told.is_authenticated else ' (not authenticated)'}"]
    lines += [f"tenant    {told.tenant}", f"roles     {', '.join(told.roles) or 'none'}"]
    lines += [f"token     {told.token_id}"] if told.token_id else []
    lines += [f"security  {'enabled' if told.security_enabled else 'off: everybody can do everything'}"]
    out.tell(msgspec.structs.asdict(told), *lines)
    return 0


def enable(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Require credentials and roles."""
    with connected(given, out) as bus:
        found = _find_dormant(bus)
        if found and not given.keep:
            return _refuse_dormant(found, out)
        bus.auth.enable(expected_version=found.version)
    content = {"enabled": True, **(found.content() if found else {})}
    out.tell(content, f"security is enabled for {broker_place(given)}", *found.lines())
    return 0


def disable(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Let everybody do everything."""
    with connected(given, out) as bus:
        bus.auth.enable(False)
    out.tell(
        {"enabled": False}, f"security is off for {broker_place(given)}: everybody who reaches it can do everything"
    )
    return 0
