"""`headrace context`: manage named broker addresses, and choose the one that commands use."""

import argparse
import os

from headrace.cli.arguments import add_json, command_maker, completes
from headrace.cli.connection import add_connection
from headrace.cli.contexts import Contexts, address, context_name, load, resolve
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, table
from headrace.cli.tls_options import add_tls_options, given_tls_options, with_given_token_file
from headrace.client.connection.environment import CONTEXT_VARIABLE, URL_VARIABLE
from headrace.model.errors import InvalidArgument

_ORDER = """\
Commands connect to the first of these that is set:
  1. --connect URL
  2. --context NAME
  3. $HEADRACE_URL
  4. $HEADRACE_CONTEXT
  5. the context chosen by `headrace context use`
  6. a broker on this machine
Contexts are stored in headrace/contexts.toml in $XDG_CONFIG_HOME (~/.config).
headrace.connect() in Python reads $HEADRACE_URL only."""

_ADD = """\
examples:
  headrace context add production headrace://queue.example.com:7390
  headrace context add secure headraces://queue.example.com --ca ca.pem --use
  headrace context add local headrace+unix:///run/headrace.sock --use
  headrace context add cluster headrace://a:7390,b:7390,c:7390
  headrace context add far http://broker.example.org:80/headrace
"""

_LIST = """\
examples:
  headrace context list
  headrace context list --json

The chosen context is marked with *.
"""

_USE = f"""\
example:
  headrace context use production

{_ORDER}
"""

_REMOVE = """\
example:
  headrace context remove production
"""

_SHOW = f"""\
examples:
  headrace context show production
  headrace context show

Without NAME it prints which broker commands connect to, and why.

{_ORDER}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace context`."""
    parser.epilog = f"{_ORDER}\n\n`headrace context COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    adding = make("add", add, "name the address of a broker", _ADD)
    adding.add_argument("name", metavar="NAME", type=context_name, help="the name")
    adding.add_argument("address", metavar="ADDRESS", type=address, help="the address, as headrace://host:7390")
    add_tls_options(adding)
    adding.add_argument("--use", action="store_true", help="also choose this context")
    adding.add_argument("--replace", action="store_true", help="replace the address of an existing context")
    listing = make("list", list_contexts, "list contexts", _LIST)
    listing.add_argument("--names", action="store_true", help="print only the names")
    using = make("use", use, "choose the broker that commands connect to", _USE)
    removing = make("remove", remove, "forget a context", _REMOVE)
    for each in (using, removing):
        completes(each.add_argument("name", metavar="NAME", help="the context's name"), "context")
    showing = make("show", show, "print a context's address, or the broker that commands connect to", _SHOW)
    completes(showing.add_argument("name", metavar="NAME", nargs="?", help="the context's name"), "context")
    for each in (adding, listing, using, removing):
        add_json(each)
    add_connection(showing)


def add(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Name an address."""
    from headrace.client.connection.addresses import parse_address, with_options

    known = load(os.environ)
    before = known.addresses.get(given.name)
    tls = given_tls_options(given)
    if tls.given():
        named = parse_address(given.address)
        given.address = str(with_options(named, tls.over(named.tls), given.address))
    given.address = with_given_token_file(given, given.address)
    if before not in (None, given.address) and not given.replace:
        raise InvalidArgument(f"context {given.name} already exists, for {before}; --replace replaces its address")
    known.addresses[given.name] = given.address
    known = known._replace(current=given.name) if given.use else known
    known.save()
    in_use = ", and commands connect to it" if known.current == given.name else ""
    out.tell(_content(known, given.name), f"context {given.name} is {given.address}{in_use}")
    if given.use:
        _note_overrides(out)
    return 0


def list_contexts(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print contexts, one per line."""
    known = load(os.environ)
    names = sorted(known.addresses)
    if out.json:
        for name in names:
            out.tell(_content(known, name))
    elif given.names:
        out.tell({}, *names)
    elif not names:
        out.note("there are no contexts; `headrace context add NAME ADDRESS` adds one")
    else:
        rows = [("*" if name == known.current else "", name, known.addresses[name]) for name in names]
        out.tell({}, *table(("", "context", "address"), *rows))
    return 0


def use(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Choose the context that commands use."""
    known = load(os.environ)
    url = known.address(given.name, "this command")
    known._replace(current=given.name).save()
    out.tell(_content(known._replace(current=given.name), given.name), f"commands now connect to {given.name}, {url}")
    _note_overrides(out)
    return 0


def _note_overrides(out: Output) -> None:
    """Warn if an environment variable overrides the chosen context."""
    for name in (URL_VARIABLE, CONTEXT_VARIABLE):
        if os.environ.get(name):
            out.note(f"${name} is set and overrides the context; `unset {name}` to connect to the chosen context")


def remove(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Forget a context."""
    known = load(os.environ)
    known.address(given.name, "this command")
    del known.addresses[given.name]
    known._replace(current=None if known.current == given.name else known.current).save()
    out.tell({"removed": given.name}, f"removed context {given.name}")
    return 0


def show(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the address of a context, or of the broker that commands connect to."""
    if given.name is not None:
        known = load(os.environ)
        url = known.address(given.name, "this command")
        out.tell(_content(known, given.name), url)
        return 0
    found = resolve(given, os.environ)
    content = {"context": found.context, "address": found.address, "source": found.source}
    out.tell(content, f"address  {found.address}", f"from     {found.source}")
    return 0


def _content(known: Contexts, name: str) -> dict[str, object]:
    return {"context": name, "address": known.addresses[name], "current": known.current == name}
