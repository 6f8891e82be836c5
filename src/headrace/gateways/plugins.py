"""Gateways of other packages, found by the scheme of an address and loaded only then."""

from collections.abc import Sequence

from headrace.gateways.addresses import ListenAddress
from headrace.gateways.gateway import Gateway, GatewayContext, GatewayFactory
from headrace.model.errors import GatewayUnavailable, HeadraceError, PluginUnavailable
from headrace.plugins import GATEWAYS, find_plugin, load_plugin

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
        plugin = find_plugin(GATEWAYS, address.scheme)
        if plugin is not None:
            return plugin.distribution
    return str(getattr(factory, "__module__", None) or type(factory).__name__)


def _load(address: ListenAddress) -> GatewayFactory:
    try:
        factory = load_plugin(GATEWAYS, address.scheme)
    except PluginUnavailable as error:
        raise GatewayUnavailable(f"cannot listen on {address}: {error}", scheme=address.scheme) from error
    if not callable(factory):
        package = _package(factory, [address])
        raise GatewayUnavailable(
            f"cannot listen on {address}: {type(factory).__name__} {factory!r} of {package} makes no gateway; install "
            f"another version of {package}",
            scheme=address.scheme,
        )
    made: GatewayFactory = factory
    return made
