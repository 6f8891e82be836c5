"""Contexts: addresses of brokers under names, kept in a file, and which of them commands use."""

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
    """What the file says."""

    path: str
    addresses: dict[str, str]
    """By name."""
    current: str | None = None

    def address(self, name: str, source: str) -> str:
        """The address of a context."""
        if name not in self.addresses:
            known = did_you_mean(name, self.addresses) or "`headrace context list` shows those there are"
            raise InvalidArgument(f"there is no context {name!r}, which {source} names; {known}")
        return self.addresses[name]

    def save(self) -> None:
        """Write the file, in one step; it is the user's alone, as addresses are nobody else's business."""
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
    """Where the broker is meant to be."""

    address: str
    source: str
    """Who says so."""
    context: str | None = None


def load(environ: Mapping[str, str]) -> Contexts:
    """The contexts there are; none without a file."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    path = os.path.join(home, "headrace", "contexts.toml")
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except FileNotFoundError:
        return Contexts(path, {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} is no TOML: {error}; put it right, or delete it") from error
    addresses, current = content.get("contexts", {}), content.get("current")
    plain = isinstance(addresses, dict) and all(isinstance(url, str) for url in addresses.values())
    if not plain or not isinstance(current, str | None):
        raise InvalidArgument(f"{path} has no table [contexts] of names and addresses; put it right, or delete it")
    return Contexts(path, addresses, current)


def resolve(given: argparse.Namespace, environ: Mapping[str, str]) -> Resolved:
    """Where the user means the broker to be, by the first that says so."""
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
    """A name that a context can have."""
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name; take letters, digits, '.', '_' and '-'")
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
    """The broker that `headrace serve` starts on this machine unless it is told otherwise."""
    from headrace.cli.configuration import default_data
    from headrace.client.connection.addresses import DEFAULT_ADDRESS, Address
    from headrace.server import SOCKET_NAME

    path = os.path.join(default_data(environ), SOCKET_NAME)
    return str(Address("", 0, path)) if _listens(path) else DEFAULT_ADDRESS


def _listens(path: str) -> bool:
    """Whether anyone listens on a Unix socket; one that was killed leaves it behind."""
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(path)
        except OSError:
            return False
    return True
