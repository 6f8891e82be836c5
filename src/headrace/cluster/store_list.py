"""Opens shared stores by their URLs: those of Headrace, and those of plug-ins."""

import importlib
import os
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from headrace.model.arguments import shown, shown_url
from headrace.model.errors import InvalidArgument
from headrace.plugins import STORES, find_plugin, make_plugin, plugin_names
from headrace.storage.disk import Disk, PrivateDisk
from headrace.storage.stores.address import StoreAddress
from headrace.storage.stores.store import SharedStore

EXTRAS = {
    "postgresql": ("psycopg", "postgres"),
    "postgres": ("psycopg", "postgres"),
    "s3": ("obstore", "s3"),
    "gs": ("obstore", "s3"),
    "az": ("obstore", "s3"),
    "redis": ("redis", "redis"),
    "rediss": ("redis", "redis"),
}
"""Schemes whose drivers need a package: its name, and the extra of Headrace that installs it."""
_MEMBERS = ("put_new", "replace", "get", "names", "delete", "close", "location", "remarks")
_SECRET_WORDS = ("password", "passwd", "secret", "token", "key_id", "account_key", "access_key", "credential")


def open_store(
    url: str,
    *,
    disk: Disk | None = None,
    credentials_file: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> SharedStore:
    """Open the store that a URL names; docs/reference/stores.md has the URLs. It connects with the first request.

    Credentials come from the environment (PGPASSWORD, AWS_ACCESS_KEY_ID, REDIS_PASSWORD and so on), or from a file with
    the same names in lines NAME=value, which goes before. Raises InvalidArgument for a URL that no store understands
    and for one with a password, PluginUnavailable if its plug-in cannot be used.
    """
    parts = _parse(url)
    if find_plugin(STORES, parts.scheme) is None:
        known = ", ".join(plugin_names(STORES))
        raise InvalidArgument(
            f"there is no store for {shown_url(url)}; there are those for {known}; write for example "
            "postgresql://headrace@db.example.com/headrace or s3://bucket/prefix, or install a plug-in"
        )
    _check_package(parts.scheme)
    secrets = dict(os.environ if environment is None else environment)
    if credentials_file:
        secrets.update(read_credentials(credentials_file))
    store: SharedStore = make_plugin(STORES, parts.scheme, _MEMBERS, _address(url, parts, secrets, disk))
    return store


def read_credentials(path: str) -> dict[str, str]:
    """The names and values in a credentials file: lines NAME=value; empty ones and those with # are left out."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidArgument(f"cannot read the credentials of the store from {path}: {why}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, equals, value = line.partition("=")
            name = name.strip().removeprefix("export ").strip()
            if not equals or not name.isidentifier():
                raise InvalidArgument(f"line {number} of {path} is not NAME=value, such as PGPASSWORD=...")
            value = value.strip()
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            found[name] = value[1:-1] if quoted else value
    return found


def _parse(url: str) -> SplitResult:
    given: object = url
    try:
        parts = urlsplit(given) if isinstance(given, str) else SplitResult("", "", "", "", "")
        _ = parts.port
    except ValueError as error:
        raise InvalidArgument(f"{shown_url(url)} is not a URL: {error}") from error
    if not parts.scheme:
        raise InvalidArgument(
            "a store is a URL such as postgresql://headrace@db.example.com/headrace, s3://bucket/prefix or "
            f"directory:///srv/headrace, not {shown_url(url) if isinstance(given, str) else shown(given)}"
        )
    return parts


def _address(url: str, parts: SplitResult, secrets: Mapping[str, str], disk: Disk | None) -> StoreAddress:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    hidden = [
        name
        for name, value in options.items()
        if any(word in name.lower() for word in _SECRET_WORDS) or _has_password(value)
    ]
    if parts.password is not None or hidden:
        raise InvalidArgument(
            f"the URL of the store {parts.scheme}://... has {f'the option {hidden[0]}' if hidden else 'a password'}, "
            "which others see in the list of processes: leave it out, and set it in the environment (PGPASSWORD, "
            "AWS_SECRET_ACCESS_KEY, REDIS_PASSWORD), in ~/.pgpass, or in the credentials file"
        )
    if parts.fragment:
        raise InvalidArgument(f"the URL {shown_url(url)} has a #; write %23 if it belongs to a name")
    return StoreAddress(
        scheme=parts.scheme,
        host=unquote(parts.hostname or ""),
        port=parts.port,
        user=unquote(parts.username or ""),
        path=unquote(parts.path),
        options=options,
        secrets=secrets,
        disk=PrivateDisk() if disk is None else disk,
    )


def _has_password(value: str) -> bool:
    """Whether an option is a URL with a password."""
    try:
        return urlsplit(value).password is not None
    except ValueError:
        return False


def _check_package(scheme: str) -> None:
    package, extra = EXTRAS.get(scheme, ("", ""))
    if not package:
        return
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise InvalidArgument(
            f"stores of {scheme}: need the package {package}, which is not installed or cannot be loaded ({error}): "
            f"pip install 'headrace[{extra}]'"
        ) from error
