"""Contexts: named broker addresses, stored in a file, and the choice of the one that commands use."""

import argparse
import json
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from typing import NamedTuple

from headrace.client.connection.environment import CONTEXT_VARIABLE, URL_VARIABLE
from headrace.model.errors import InvalidArgument
from headrace.model.suggestions import did_you_mean

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


class Contexts(NamedTuple):
    """The content of the contexts file."""

    path: str
    addresses: dict[str, str]
    """By name."""
    current: str | None = None

    def address(self, name: str, source: str) -> str:
        """Return the address of a context."""
        if name not in self.addresses:
            known = did_you_mean(name, self.addresses) or "`headrace context list` shows those there are"
            raise InvalidArgument(f"there is no context {name!r}, named by {source}; {known}")
        return self.addresses[name]

    def save(self) -> None:
        """Replace the file atomically; only the user may read it, as addresses can be confidential."""
        lines = ["# The brokers that `headrace context` knows."]
        lines += [f"current = {json.dumps(self.current)}"] if self.current is not None else []
        lines += [
            "",
            "[contexts]",
            *(f"{json.dumps(name)} = {json.dumps(url)}" for name, url in self.addresses.items()),
        ]
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        beside = f"{self.path}.{os.getpid()}"
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
            os.replace(beside, self.path)
        except BaseException:
            if os.path.exists(beside):
                os.unlink(beside)
            raise


class Resolved(NamedTuple):
    """A broker's address, and what named it."""

    address: str
    source: str
    """Who says so."""
    context: str | None = None


def load(environ: Mapping[str, str]) -> Contexts:
    """Read the contexts file; no contexts if it does not exist."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    path = os.path.join(home, "headrace", "contexts.toml")
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except FileNotFoundError:
        return Contexts(path, {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} is not TOML: {error}; correct or delete it") from error
    addresses, current = content.get("contexts", {}), content.get("current")
    plain = isinstance(addresses, dict) and all(isinstance(url, str) for url in addresses.values())
    if not plain or not isinstance(current, str | None):
        raise InvalidArgument(f"{path} has no table [contexts] of names and addresses; correct or delete it")
    return Contexts(path, addresses, current)


def resolve(given: argparse.Namespace, environ: Mapping[str, str]) -> Resolved:
    """Return the broker's address from the first source that names one."""
    if given.connect:
        return Resolved(given.connect, "--connect")
    chosen = getattr(given, "context", None)
    if not chosen and environ.get(URL_VARIABLE):
        return Resolved(_checked(environ[URL_VARIABLE], f"${URL_VARIABLE}"), f"${URL_VARIABLE}")
    if chosen:
        source = "--context"
    elif environ.get(CONTEXT_VARIABLE):
        chosen, source = environ[CONTEXT_VARIABLE], f"${CONTEXT_VARIABLE}"
    known = load(environ)
    if not chosen and known.current is not None:
        chosen, source = known.current, known.path
    if chosen:
        url = _checked(known.address(chosen, source), f"context {chosen} in {known.path}")
        return Resolved(url, f"context {chosen} ({source})", chosen)
    return Resolved(_address_here(environ), "default")


def context_name(text: str) -> str:
    """Parse the name of a context."""
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name; use letters, digits, '.', '_' and '-'")
    return text


def address(text: str) -> str:
    """A broker's address."""
    from headrace.client.connection.addresses import parse_address

    try:
        parse_address(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def tenant(text: str) -> str:
    """A tenant's name."""
    from headrace.model.topic import checked_tenant

    try:
        return checked_tenant(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _checked(text: str, source: str) -> str:
    from headrace.client.connection.addresses import checked_address

    return checked_address(text, source)


def _address_here(environ: Mapping[str, str]) -> str:
    """Return the address of the broker that `headrace serve` starts on this machine by default."""
    from headrace.cli.configuration import default_data
    from headrace.client.connection.addresses import DEFAULT_ADDRESS, Address
    from headrace.server import SOCKET_NAME

    path = os.path.join(default_data(environ), SOCKET_NAME)
    return str(Address("", 0, path)) if _listens(path) else DEFAULT_ADDRESS


def _listens(path: str) -> bool:
    """Return whether a process listens on a Unix socket; a killed process leaves its socket file behind."""
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(path)
        except OSError:
            return False
    return True
