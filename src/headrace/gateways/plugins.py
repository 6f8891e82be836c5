"""Gateways of other packages, found by the scheme of an address and loaded only then."""

import logging
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from headrace.gateways.addresses import ListenAddress
from headrace.gateways.gateway import Gateway, GatewayContext, GatewayFactory
from headrace.model.errors import GatewayUnavailable, HeadraceError

logger = logging.getLogger("headrace.gateways")

GROUP = "headrace.gateways"
"""The entry-point group: a plug-in's name there is the scheme of its addresses."""
_MEMBERS = sorted(name for name in vars(Gateway) if not name.startswith("_"))


def load_factories(addresses: Sequence[ListenAddress]) -> dict[GatewayFactory, list[ListenAddress]]:
    """Load the plug-ins that addresses name, and divide the addresses among them."""
    divided: dict[GatewayFactory, list[ListenAddress]] = {}
    for address in addresses:
        divided.setdefault(_load(address), []).append(address)
    return divided


def make_gateway(factory: GatewayFactory, context: GatewayContext, addresses: Sequence[ListenAddress]) -> Gateway:
    """Let a plug-in make its gateway, and check that it is one."""
    named = ", ".join(map(str, addresses))
    try:
        gateway = factory(context, addresses)
    except HeadraceError:
        raise
    except (Exception, SystemExit) as error:
        raise gateway_failed(factory, addresses, f"cannot be made: {type(error).__name__}: {error}") from error
    lacking = []
    for name in _MEMBERS:
        try:
            if not hasattr(gateway, name):
                lacking.append(name)
        except (Exception, SystemExit) as error:  # a property of it
            text = f"cannot tell {name}: {type(error).__name__}: {error}"
            raise gateway_failed(factory, addresses, text) from error
    if lacking:
        raise GatewayUnavailable(
            f"the gateway for {named} is a {type(gateway).__name__}, which lacks {', '.join(lacking)}; install a "
            f"version of {_package(factory, addresses)} for this version of Headrace"
        )
    return gateway


def gateway_failed(factory: GatewayFactory, addresses: Sequence[ListenAddress], text: str) -> GatewayUnavailable:
    """The error for a gateway that does not do what a gateway must; it names the package."""
    package, named = _package(factory, addresses), ", ".join(map(str, addresses))
    return GatewayUnavailable(f"the gateway of {package} for {named} {text}; mend or reinstall {package}")


def _package(factory: GatewayFactory, addresses: Sequence[ListenAddress]) -> str:
    """The name of the package that has a gateway, or that of its module."""
    for address in addresses:
        for entry in entry_points(group=GROUP, name=address.scheme):
            if entry.dist is not None:
                return entry.dist.name
    return str(getattr(factory, "__module__", None) or type(factory).__name__)


def _load(address: ListenAddress) -> GatewayFactory:
    entry = _entry_point(address)
    package = entry.dist.name if entry.dist is not None else entry.module
    try:
        factory = entry.load()
    except (Exception, SystemExit) as error:
        raise GatewayUnavailable(
            f"cannot listen on {address}: the gateway {entry.value} of {package} cannot be loaded: "
            f"{type(error).__name__}: {error}; mend or reinstall {package}",
            scheme=address.scheme,
        ) from error
    if not callable(factory):
        raise GatewayUnavailable(
            f"cannot listen on {address}: {entry.value} of {package} is a {type(factory).__name__} and makes no "
            f"gateway; install another version of {package}",
            scheme=address.scheme,
        )
    logger.info("gateway loaded  scheme=%s package=%s", address.scheme, package)
    made: GatewayFactory = factory
    return made


def _entry_point(address: ListenAddress) -> EntryPoint:
    found = {entry.value: entry for entry in entry_points(group=GROUP, name=address.scheme)}
    if not found:
        known = ", ".join(sorted({"headrace", "unix", *entry_points(group=GROUP).names}))
        raise GatewayUnavailable(
            f"cannot listen on {address}: there is no gateway for {address.scheme}://; there are {known}; install the "
            "package that has it, where Headrace is installed",
            scheme=address.scheme,
        )
    if len(found) > 1:
        packages = sorted(entry.dist.name if entry.dist is not None else entry.value for entry in found.values())
        raise GatewayUnavailable(
            f"cannot listen on {address}: several packages have a gateway for {address.scheme}://: "
            f"{', '.join(packages)}; uninstall all but one",
            scheme=address.scheme,
        )
    return next(iter(found.values()))
