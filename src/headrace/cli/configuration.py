"""Settings of `headrace serve`: merges flags, environment, file and defaults, and records the source of each."""

import argparse
import difflib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.cli.arguments import duration, size
from headrace.client.connection.environment import (
    CA_VARIABLE,
    CERTIFICATE_VARIABLE,
    CONTEXT_VARIABLE,
    KEY_VARIABLE,
    TENANT_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    URL_VARIABLE,
)
from headrace.model.durability import Durability
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.topic import TopicSettings
from headrace.server import DEFAULT_HTTP_ADDRESS, MEMORY, ServerSettings, missing_packages, replaced_by_listen

PREFIX = "HEADRACE_"
CONFIG_VARIABLE = "HEADRACE_CONFIG"
DEFAULT = "default"
_NOT_SETTINGS = {
    CONFIG_VARIABLE,
    CONTEXT_VARIABLE,
    URL_VARIABLE,
    CA_VARIABLE,
    CERTIFICATE_VARIABLE,
    KEY_VARIABLE,
    TOKEN_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TENANT_VARIABLE,
}
"""Environment variables that are not settings of the broker, but of clients."""
_PATHS = ("data", "unix_socket", "tls_certificate", "tls_key", "tls_key_password_file", "tls_client_ca")
_PATH_LISTS = ("tls_sni_certificates",)
_NEAR, _VERY_NEAR = 0.4, 0.85
_WORDS = {"yes": True, "true": True, "on": True, "1": True, "no": False, "false": False, "off": False, "0": False}

FIELDS = {field.name: field for field in msgspec.structs.fields(ServerSettings)}
TOPIC_FIELDS = {
    field.name: field
    for field in msgspec.structs.fields(TopicSettings)
    if field.name not in ("middleware", "view_of", "view_query")
}
"""The settings that can be defaults of new topics."""


class GivenSetting(NamedTuple):
    """A value given for a setting, and its source."""

    content: Any
    source: str


Givens = dict[str, GivenSetting]
"""Values by setting name; settings of topics are named like `topic.partitions`."""


class Configuration(NamedTuple):
    """The settings in effect."""

    settings: ServerSettings
    givens: Givens
    """The settings that were given explicitly; all others have their defaults."""
    file: str | None

    def source(self, name: str) -> str:
        """Return the source of a setting."""
        return self.givens[name].source if name in self.givens else DEFAULT

    def contents(self) -> dict[str, Any]:
        """Return the settings as plain values by name, those of topics as `topic.NAME`."""
        plain = {name: getattr(self.settings, name) for name in FIELDS if name != "topic"}
        plain["unix_socket"] = self.settings.socket_path
        topic = self.settings.broker().topic.as_dict()
        return {**plain, **{f"topic.{name}": topic[name] for name in TOPIC_FIELDS}}

    def as_toml(self) -> str:
        """Return a configuration file with the same settings, with a comment on the source of each."""
        lines = ["# The settings in effect, and where each comes from."]
        for name, content in self.contents().items():
            _, dot, key = name.rpartition(".")
            if dot and "[topic]" not in lines:
                lines += ["", "[topic]"]
            # TOML has no null.
            line = f"# {key} is not set" if content is None else f"{key} = {_toml(content)}"
            lines.append(f"{line}  # {self.source(name)}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings and their sources for JSON output."""
        contents = self.contents()
        topic = {name.removeprefix("topic."): contents.pop(name) for name in list(contents) if "." in name}
        sources = {name: given.source for name, given in self.givens.items()}
        return {"settings": {**contents, "topic": topic}, "sources": sources, "file": self.file}


def configure(
    flags: Mapping[str, str | list[str]], topic_flags: Mapping[str, str], config: str | None, environ: Mapping[str, str]
) -> Configuration:
    """Load the settings in effect; flags override the environment, which overrides the file and the defaults."""
    path, why = _config_file(config, environ)
    givens = _defaults(environ)
    if path is not None:
        givens |= _from_file(path, why)
    givens |= _from_environment(environ)
    givens |= from_flags(flags, topic_flags)
    if "http_address" not in givens and not givens.keys() & {"listen", "host", "port"} and not missing_packages():
        givens["http_address"] = GivenSetting(DEFAULT_HTTP_ADDRESS, DEFAULT)
    for name, text in replaced_by_listen(givens).items():
        givens[name] = GivenSetting(text, givens["listen"].source)
    plain: dict[str, Any] = {name: given.content for name, given in givens.items() if not name.startswith("topic.")}
    plain["topic"] = {name[6:]: given.content for name, given in givens.items() if name.startswith("topic.")}
    try:
        settings = ServerSettings(**plain)
    except HeadraceError as error:
        raise InvalidArgument(f"{error}{_blame(str(error), givens)}") from error
    return Configuration(settings, {name: given for name, given in givens.items() if given.source != DEFAULT}, path)


def from_flags(flags: Mapping[str, str | list[str]], topic_flags: Mapping[str, str]) -> Givens:
    """Read settings from flags."""
    givens = {}
    for name, text in flags.items():
        source = f"flag --{name.replace('_', '-')}"
        givens[name] = GivenSetting(_read(name, text, source, os.getcwd()), source)
    for key, text in topic_flags.items():
        name, source = f"topic.{key}", f"flag --topic {key}={text}"
        _known(key, TOPIC_FIELDS, "topic's setting", source)
        givens[name] = GivenSetting(_read(name, text, source, os.getcwd()), source)
    return givens


def default_data(environ: Mapping[str, str]) -> str:
    """Return the default data directory."""
    home = environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return os.path.join(home, "headrace")


def _defaults(environ: Mapping[str, str]) -> Givens:
    return {"data": GivenSetting(default_data(environ), DEFAULT)}


def _config_file(config: str | None, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the configuration file, if there is one, and the source of its path."""
    if config is not None:
        return config, "--config"
    if environ.get(CONFIG_VARIABLE):
        return environ[CONFIG_VARIABLE], CONFIG_VARIABLE
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    path = os.path.join(home, "headrace", "headrace.toml")
    return (path, "") if os.path.exists(path) else (None, "")


def _from_file(path: str, why: str) -> Givens:
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidArgument(f"there is no file {path}, which {why or 'was there a moment ago'} names") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} is not TOML: {error}") from error
    source = f"file {path}"
    topic = content.pop("topic", {})
    if not isinstance(topic, dict):
        raise InvalidArgument(f"topic must be a table of settings ({source})")
    givens, folder = {}, os.path.dirname(os.path.abspath(path))
    for name, value in content.items():
        _known(name, FIELDS, "setting", source)
        givens[name] = GivenSetting(_read(name, value, source, folder), source)
    for key, value in topic.items():
        _known(key, TOPIC_FIELDS, "topic's setting", source)
        givens[f"topic.{key}"] = GivenSetting(_read(f"topic.{key}", value, source, folder), source)
    return givens


def _from_environment(environ: Mapping[str, str]) -> Givens:
    names = {_variable(name): name for name in FIELDS if name != "topic"}
    names |= {_variable(f"topic.{name}"): f"topic.{name}" for name in TOPIC_FIELDS}
    givens = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in _NOT_SETTINGS:
            continue
        name = names.get(variable)
        source = f"environment {variable}"
        if name is not None:
            content = _read(name, text, source, os.getcwd())
            if content != []:  # no address: as if the variable were not set
                givens[name] = GivenSetting(content, source)
        elif near := difflib.get_close_matches(variable, names, 1, _VERY_NEAR):
            raise InvalidArgument(f"{variable} in the environment is no setting; did you mean {near[0]}?")
    return givens


def _variable(name: str) -> str:
    return PREFIX + name.replace(".", "_").upper()


def _known(name: str, names: Iterable[str], what: str, source: str) -> None:
    names = [known for known in names if known != "topic"]
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, _NEAR)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
        raise InvalidArgument(f"there is no {what} {name!r} ({source}){hint}")


def _read(name: str, content: Any, source: str, folder: str) -> Any:
    """Parse and check the value of a setting, which is text or already a plain value."""
    key = name.removeprefix("topic.")
    field = (TOPIC_FIELDS if name.startswith("topic.") else FIELDS)[key]
    if field.type is Durability:
        return content  # by its name
    try:
        if isinstance(content, str):
            content = _parsed(key, content, field.type)
        msgspec.convert(content, field.type)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise InvalidArgument(f"{name}: {error} ({source})") from error
    if name in _PATHS and content and content != MEMORY:
        return _absolute(content, folder)
    return [_absolute(path, folder) for path in content] if name in _PATH_LISTS else content


def _absolute(path: str, folder: str) -> str:
    return os.path.normpath(os.path.join(folder, os.path.expanduser(path)))


def _parsed(key: str, text: str, kind: Any) -> Any:
    """Parse a value of a type from text, with its unit if it has one."""
    if kind is bool:
        if text.lower() not in _WORDS:
            raise ValueError(f"{text!r} is neither yes nor no")
        return _WORDS[text.lower()]
    if kind == list[str]:
        return text.replace(",", " ").split()
    optional = kind == (int | None) or kind == (float | None)
    if optional and text == "none":
        return None
    if kind is int or kind == (int | None):
        return size(text) if "bytes" in key else _number(text, int, "whole number")
    if kind is float or kind == (float | None):
        return _number(text, float, "number") if _is_zero(text) else duration(text)
    return text


def _is_zero(text: str) -> bool:
    return not text.strip("0.")


def _number(text: str, kind: Callable[[str], Any], what: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is no {what}") from None


def _blame(text: str, givens: Givens) -> str:
    """Return the sources of the settings that an error names."""
    words = set(text.replace(",", " ").replace(":", " ").split())
    sources = [given.source for name, given in givens.items() if name.removeprefix("topic.") in words]
    return f" ({', '.join(dict.fromkeys(sources))})" if sources else ""


def _toml(content: Any) -> str:
    """Encode a plain value as TOML, whose strings differ from JSON's in one character."""
    return json.dumps(content, ensure_ascii=False).replace("\x7f", "\\u007f")


def topic_flag(text: str) -> tuple[str, str]:
    """Parse a topic setting, given as NAME=VALUE."""
    name, equals, content = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, content
