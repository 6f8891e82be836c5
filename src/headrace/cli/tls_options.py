"""Options of the commands for connections with TLS and with a token."""

import argparse
import os
from typing import TYPE_CHECKING

from headrace.cli.arguments import completes
from headrace.client.connection.environment import (
    CA_VARIABLE,
    CERTIFICATE_VARIABLE,
    KEY_VARIABLE,
    TOKEN_FILE_VARIABLE,
)

if TYPE_CHECKING:
    from headrace.client.connection.tls_options import TlsOptions


def add_tls_options(group: argparse._ActionsContainer) -> None:
    """Add the options: the token, which CAs to trust, and the client's own certificate."""
    for name, metavar, text in (
        ("--token-file", "FILE", f"file with the token to authenticate with (default: ${TOKEN_FILE_VARIABLE})"),
        ("--ca", "FILE", f"with headraces://, the CAs to trust (default: ${CA_VARIABLE}, else those of the system)"),
        ("--certificate", "FILE", f"with headraces://, the client's certificate (default: ${CERTIFICATE_VARIABLE})"),
        (
            "--certificate-key",
            "FILE",
            f"the private key of --certificate (default: ${KEY_VARIABLE}, else the same file)",
        ),
        ("--server-name", "NAME", "with headraces://, the name that the broker's certificate must have"),
    ):
        added = group.add_argument(name, metavar=metavar, help=text)
        if metavar == "FILE":
            completes(added, "file")


def with_given_token_file(given: argparse.Namespace, address: str) -> str:
    """The address with the token file that the user gave, as an absolute path."""
    path: str | None = getattr(given, "token_file", None)
    if not path:
        return address
    from headrace.client.connection.addresses import with_token_file

    return with_token_file(address, os.path.abspath(os.path.expanduser(path)))


def given_tls_options(given: argparse.Namespace) -> "TlsOptions":
    """The options that the user gave; paths are made absolute, as they may be used in another directory."""
    from headrace.client.connection.tls_options import tls_options

    def path(name: str) -> str | None:
        text: str | None = getattr(given, name, None)
        return os.path.abspath(os.path.expanduser(text)) if text else text

    name: str | None = getattr(given, "server_name", None)
    return tls_options(path("ca"), path("certificate"), path("certificate_key"), name)
