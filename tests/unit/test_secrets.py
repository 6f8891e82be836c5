"""Secrets are not in what is shown: representations, settings, options of commands."""

import importlib
import pkgutil
import re
from collections.abc import Iterator

import msgspec
import pytest

from headrace.cli.command_list import COMMANDS
from headrace.model.errors import InvalidArgument
from headrace.server.settings import ServerSettings
from headrace.wire.native import Hello

SECRET_FIELDS = re.compile(r"token|secret|secrets|credentials|password|passphrase|private_key")
ROOMS = ("model", "wire", "broker", "security", "push")
SETTINGS_NAMES = re.compile(r"token|secret|password|passphrase")


def structs() -> Iterator[type[msgspec.Struct]]:
    for room in ROOMS:
        package = importlib.import_module(f"headrace.{room}")
        for module in pkgutil.iter_modules(package.__path__):
            loaded = importlib.import_module(f"headrace.{room}.{module.name}")
            for found in vars(loaded).values():
                if (
                    isinstance(found, type)
                    and issubclass(found, msgspec.Struct)
                    and found.__module__ == loaded.__name__
                ):
                    yield found


def test_no_representation_shows_a_secret() -> None:
    found = [
        struct for struct in structs() if any(SECRET_FIELDS.fullmatch(field) for field in struct.__struct_fields__)
    ]
    assert Hello in found
    shown = {struct.__name__ for struct in found if struct.__repr__ is msgspec.Struct.__repr__}
    assert not shown, "its repr would show a secret: give it one of its own"
    hidden = repr(Hello(mechanism="bearer", credentials=b"hr_000000000000_not-to-be-seen"))
    assert "not-to-be-seen" not in hidden


def test_settings_name_files_with_secrets_and_have_none() -> None:
    names = [name for name in ServerSettings.__struct_fields__ if SETTINGS_NAMES.search(name)]
    known = ["tls_key_password_file", "node_token_file"]
    assert names == known, "`--print-config` and lists of processes show settings"


@pytest.mark.parametrize("command", [name for group in COMMANDS.values() for name in group])
def test_no_command_takes_a_secret_as_an_argument(command: str) -> None:
    module = importlib.import_module(f"headrace.cli.commands.{command}")
    with open(str(module.__file__), encoding="utf-8") as file:
        options = re.findall(r'"(--[a-z-]*(?:token|secret|password)[a-z-]*)"', file.read())
    assert all(option.endswith("-file") for option in options), "lists of processes show arguments"


def test_a_jwks_url_with_a_password_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        ServerSettings(
            data=":memory:", jwt_issuer="i", jwt_audience="a", jwt_keys="https://user:not-to-be-seen@example.org/jwks"
        )
