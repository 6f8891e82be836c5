"""Plug-ins: entry points of installed packages, found by group and name, and imported only when they are named."""

import importlib
import logging
import traceback
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from headrace.model.errors import HeadraceError, PluginUnavailable

logger = logging.getLogger("headrace.plugins")

API = 1
"""The version of the interfaces between Headrace and plug-ins; each plug-in says in `api` which one it is for."""

GATEWAYS = "headrace.gateways"
"""Gateways by the scheme of their addresses: called with a GatewayContext and the addresses, return a Gateway."""
MIDDLEWARE = "headrace.middleware"
"""Middleware by name: transforms the batches of topics whose settings name it."""
SERIALIZERS = "headrace.serializers"
"""Serializers by short name or content type: called without arguments, return an object with `encode` and `decode`."""
SINKS = "headrace.sinks"
"""Sinks by the scheme of their URLs: called with the URL, return a Sink."""
AUTHENTICATORS = "headrace.authenticators"
"""Authenticators by name: called without arguments, return the function that says who a client is."""
COMMANDS = "headrace.commands"
"""Commands by name: a module, or an object, with `add_arguments(parser)`."""
STORES = "headrace.stores"
"""Shared stores by the scheme of their URLs: called with a StoreAddress, return a SharedStore."""
GROUPS = (GATEWAYS, MIDDLEWARE, SERIALIZERS, SINKS, AUTHENTICATORS, COMMANDS, STORES)
"""All entry-point groups."""

OURS = "headrace"
"""The distribution whose entry points need no look-up."""
BUILT_IN: dict[str, dict[str, str]] = {
    GATEWAYS: {
        "headrace": "headrace.gateways.native.gateway:NativeGateway",
        "headraces": "headrace.gateways.native.gateway:NativeGateway",
        "unix": "headrace.gateways.native.gateway:NativeGateway",
        "headrace+unix": "headrace.gateways.native.gateway:NativeGateway",
        "http": "headrace.gateways.http.gateway:HttpGateway",
        "https": "headrace.gateways.http.gateway:HttpGateway",
    },
    MIDDLEWARE: {
        "combine": "headrace.middleware.combine:CombineMiddleware",
        "compress": "headrace.middleware.compress:CompressMiddleware",
        "enrich": "headrace.middleware.enrich:EnrichMiddleware",
        "redact": "headrace.middleware.redact:make_redact",
        "schema": "headrace.middleware.schema:SchemaMiddleware",
        "split": "headrace.middleware.split:SplitMiddleware",
        "transform": "headrace.middleware.transform:make_transform",
    },
    SERIALIZERS: {
        "bytes": "headrace.client.producer.serializing:BytesSerializer",
        "str": "headrace.client.producer.serializing:TextSerializer",
        "json": "headrace.client.producer.serializing:JsonSerializer",
        "msgpack": "headrace.client.producer.serializing:MessagePackSerializer",
        "application/json": "headrace.client.producer.serializing:JsonSerializer",
        "application/vnd.msgpack": "headrace.client.producer.serializing:MessagePackSerializer",
    },
    SINKS: {
        "file": "headrace.sinks.file_sink:FileSink",
        "http": "headrace.sinks.http_sink:HttpSink",
        "https": "headrace.sinks.http_sink:HttpSink",
    },
    AUTHENTICATORS: {
        "anonymous": "headrace.gateways.authentication:AnonymousAuthenticator",
        "builtin": "headrace.gateways.builtin_authenticator:BuiltinAuthenticator",
    },
    COMMANDS: {},
    STORES: {
        "memory": "headrace.storage.stores.memory:open_memory",
        "directory": "headrace.storage.stores.directory:open_directory",
        "postgresql": "headrace.storage.stores.postgres:open_postgres",
        "postgres": "headrace.storage.stores.postgres:open_postgres",
        "s3": "headrace.storage.stores.objects:open_s3",
        "gs": "headrace.storage.stores.objects:open_gcs",
        "az": "headrace.storage.stores.objects:open_azure",
        "redis": "headrace.storage.stores.redis:open_redis",
        "rediss": "headrace.storage.stores.redis:open_redis",
    },
}
"""The plug-ins of Headrace itself, the same as in pyproject.toml: found here, because reading metadata takes 30 ms."""


class Plugin(NamedTuple):
    """An entry point of an installed package, not imported yet."""

    group: str
    name: str
    target: str
    """The module, and the attribute behind a colon if there is one."""
    distribution: str
    version: str

    @property
    def package(self) -> str:
        """Name and version of the distribution."""
        return f"{self.distribution} {self.version}".rstrip()


def list_plugins(group: str) -> list[Plugin]:
    """All plug-ins of a group, by name, those of Headrace included; reads the metadata of installed packages once."""
    ours = [Plugin(group, name, target, OURS, _our_version()) for name, target in BUILT_IN[group].items()]
    return sorted([*ours, *_installed(group)])


def find_plugin(group: str, name: str) -> Plugin | None:
    """The plug-in of that name, or None; raises PluginUnavailable if several packages have one."""
    if (target := BUILT_IN[group].get(name)) is not None:
        return Plugin(group, name, target, OURS, "")
    found = [plugin for plugin in _installed(group) if plugin.name == name]
    if len(found) > 1:
        packages = " and ".join(plugin.package for plugin in found)
        raise PluginUnavailable(
            f"several packages have a plug-in {name!r} in {group}: {packages}; uninstall all but one",
            group=group,
            name=name,
        )
    return found[0] if found else None


def plugin_names(group: str) -> list[str]:
    """The names that plug-ins of a group have."""
    return sorted({plugin.name for plugin in list_plugins(group)})


@cache
def load_plugin(group: str, name: str) -> Any:
    """Import the plug-in of that name, and check that it is for this version of the interfaces.

    Raises PluginUnavailable if there is none, if several packages have it, or if it cannot be used.
    """
    plugin = find_plugin(group, name)
    if plugin is None:
        known = ", ".join(plugin_names(group)) or "none"
        raise PluginUnavailable(
            f"there is no plug-in {name!r} in {group}; installed are: {known}; install the package that has it, where "
            "Headrace is installed",
            group=group,
            name=name,
        )
    return load_exactly(plugin)


def make_plugin(group: str, name: str, members: Sequence[str], *arguments: object) -> Any:
    """Load a plug-in, call it with these arguments, and check that what it returns has these members.

    Raises PluginUnavailable if it cannot be loaded, or is no such thing; errors of Headrace stay as they are.
    """
    factory = load_plugin(group, name)
    plugin = find_plugin(group, name)
    assert plugin is not None
    try:
        made = factory(*arguments)
        lacking = [member for member in members if not hasattr(made, member)]
    except HeadraceError:
        raise
    except (Exception, SystemExit) as error:
        raise plugin_failed(plugin, error, "cannot be used") from error
    if lacking:
        text = f"made a {type(made).__name__}, which lacks {', '.join(lacking)}: install another version of it"
        raise _unusable(plugin, text)
    return made


def forget_plugins() -> None:
    """Forget what was found and loaded, so that packages installed since are found."""
    _installed.cache_clear()
    load_plugin.cache_clear()
    importlib.invalidate_caches()


def plugin_failed(plugin: Plugin, error: BaseException, what: str = "cannot be loaded") -> PluginUnavailable:
    """The error about a plug-in that raised; the log gets the traceback."""
    logger.error("plug-in failed  plugin=%s package=%s", plugin.target, plugin.package, exc_info=error)
    last = traceback.format_exception_only(error)[-1].strip()
    return _unusable(plugin, f"{what}: {last}; mend or reinstall {plugin.distribution}")


def load_exactly(plugin: Plugin) -> Any:
    """Import this plug-in, and check that it is for this version of the interfaces; raises PluginUnavailable."""
    try:
        module, _, attributes = plugin.target.partition(":")
        loaded: Any = importlib.import_module(module.strip())
        for attribute in filter(None, attributes.partition("[")[0].strip().split(".")):
            loaded = getattr(loaded, attribute)
        api = getattr(loaded, "api", None)
    except (Exception, SystemExit) as error:
        raise plugin_failed(plugin, error) from error
    if api is None:
        raise _unusable(
            plugin, f"does not say which plug-in interface it is for: add `api = {API}` to it, or reinstall it"
        )
    if api != API:
        text = f"is for version {api!r} of the plug-in interface, and this Headrace has {API}"
        raise _unusable(plugin, f"{text}: install another version of {plugin.distribution}, or of Headrace")
    if plugin.distribution != OURS:
        logger.info("plug-in loaded  group=%s name=%s package=%s", plugin.group, plugin.name, plugin.package)
    return loaded


def _unusable(plugin: Plugin, text: str) -> PluginUnavailable:
    return PluginUnavailable(
        f"the plug-in {plugin.name!r} of {plugin.package} ({plugin.target}) {text}",
        group=plugin.group,
        name=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
    )


@cache
def _installed(group: str) -> list[Plugin]:
    """The plug-ins of other packages."""
    from importlib.metadata import entry_points  # imported here: the import is slow, and most programs need none

    found = []
    for entry in entry_points(group=group):
        distribution = entry.dist.name if entry.dist is not None else entry.module
        version = entry.dist.version if entry.dist is not None else ""
        if distribution != OURS:
            found.append(Plugin(group, entry.name, entry.value, distribution, version))
    return sorted(set(found))


def _our_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(OURS)
    except PackageNotFoundError:
        return ""  # run from its source
