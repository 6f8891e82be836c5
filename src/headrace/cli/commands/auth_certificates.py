"""`headrace auth certificate`: make certificates for development."""

import argparse
import os
import shlex
from collections.abc import Callable

from headrace.cli.arguments import Command, CommandParser, add_json, completes, more_than_zero
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output
from headrace.model.errors import InvalidArgument

_EPILOG = """\
examples:
  headrace auth certificate server
  headrace auth certificate server broker.example.org 192.0.2.7
  headrace auth certificate client billing

Makes a CA for development if DIR has none, and a certificate that it signs. For a
server NAMEs are its host names and addresses, besides localhost and this machine's
own; for a client one NAME is its identity. All files are for their owner alone.
Whoever has ca-key.pem can make certificates that your clients accept. In
production, use a CA that somebody looks after. Needs pip install 'headrace[security]'.
"""


def default_directory() -> str:
    """The directory of the CA where none is given."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(home, "headrace", "certificates")


def add_certificate_command(make: Callable[[str, Command | None, str, str], CommandParser]) -> None:
    """Add the command to those of `headrace auth`."""
    parser = make("certificate", certificate, "make a certificate for development", _EPILOG)
    parser.add_argument("kind", metavar="KIND", choices=("server", "client"), help="server or client")
    parser.add_argument("names", metavar="NAME", nargs="*", help="names of the server, or the name of the client")
    where = "headrace/certificates in $XDG_CONFIG_HOME, ~/.config"
    directory = parser.add_argument("--directory", metavar="DIR", help=f"of the CA (default: {where})")
    completes(directory, "directory")
    parser.add_argument(
        "--days", metavar="N", type=more_than_zero(float), default=397.0, help="how long it is valid (default: 397)"
    )
    add_json(parser)


def certificate(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Make a certificate, and the CA if there is none."""
    from headrace.security.development_ca import DevelopmentCa, own_names

    if given.kind == "client" and len(given.names) != 1:
        raise InvalidArgument("give one NAME: that of the client's identity")
    ca = DevelopmentCa(given.directory or default_directory())
    if given.kind == "server":
        names = own_names(given.names)
        made = ca.make_server(names, days=given.days)
    else:
        names = given.names
        made = ca.make_client(names[0], days=given.days)
    lines = [f"certificate  {made.certificate}", f"private key  {made.key}", f"CA           {made.ca}"]
    lines += [f"for          {', '.join(names)}", ""]
    quoted = {name: shlex.quote(path) for name, path in made._asdict().items()}
    if given.kind == "server":
        lines += [
            f"start    headrace serve --tls-certificate {quoted['certificate']} --tls-key {quoted['key']}",
            f"connect  headrace info --connect headraces://localhost --ca {quoted['ca']}",
        ]
    else:
        lines += [
            f"accept   headrace serve ... --tls-client-ca {quoted['ca']}",
            f"connect  headrace info --connect headraces://localhost --ca {quoted['ca']} "
            f"--certificate {quoted['certificate']} --certificate-key {quoted['key']}",
        ]
    out.tell({**made._asdict(), "names": names, "ca_created": ca.is_new}, *lines)
    return 0
