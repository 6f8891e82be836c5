"""All gateways of a server: started one after the other, and stopped together."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from headrace.gateways.addresses import (
    NATIVE_SCHEMES,
    ListenAddress,
    parse_listen_address,
    tcp_address,
    unix_address,
)
from headrace.model.errors import GatewayUnavailable, HeadraceError, InvalidArgument, ListenFailed

if TYPE_CHECKING:
    from headrace.gateways.gateway import Gateway, GatewayContext, GatewayFactory
    from headrace.server.settings import ServerSettings

logger = logging.getLogger("headrace.server")


def listen_addresses(settings: "ServerSettings") -> list[ListenAddress]:
    """All addresses that settings name: host and port first, then `listen`, then the Unix socket."""
    from headrace.gateways.unix_socket import PATH_BYTES_MAX

    addresses = [tcp_address(settings.host, settings.port)] if settings.host else []
    addresses += map(parse_listen_address, settings.listen)
    addresses += [unix_address(settings.socket_path)] if settings.socket_path else []
    fitting = []
    for address in addresses:
        if address.scheme in NATIVE_SCHEMES and len(os.fsencode(address.path)) > PATH_BYTES_MAX:
            text = f"{address.path} is too long for a Unix socket, which takes {PATH_BYTES_MAX} bytes"
            if settings.unix_socket is not None or address.path != settings.socket_path:
                raise InvalidArgument(f"{text}: give unix_socket another")
            logger.warning("%s; not listening on it: give unix_socket another", text)
        else:
            fitting.append(address)
    return fitting


def load_gateways(addresses: Sequence[ListenAddress]) -> "dict[GatewayFactory, list[ListenAddress]]":
    """Load the gateways that addresses name. The native one comes first, also for no address: programs attach to it."""
    from headrace.gateways.native.gateway import NativeGateway
    from headrace.gateways.plugins import load_factories

    native = [address for address in addresses if address.scheme in NATIVE_SCHEMES]
    return {NativeGateway: native, **load_factories([address for address in addresses if address not in native])}


async def start_gateway(
    factory: "GatewayFactory",
    context: "GatewayContext",
    addresses: Sequence[ListenAddress],
    made: "Callable[[Gateway], None]",
) -> list[str]:
    """Make a gateway, pass it to `made`, and start it; returns the URLs on which it listens."""
    from headrace.gateways.plugins import make_gateway

    gateway = make_gateway(factory, context, addresses)
    made(gateway)  # before it starts: whatever happens now, it is closed with the others
    named = ", ".join(map(str, addresses))
    try:
        urls = await gateway.start()
    except HeadraceError:
        raise
    except OSError as error:
        raise ListenFailed(f"cannot listen on {named}: {error}; give another address with --listen") from error
    except Exception as error:
        raise GatewayUnavailable(
            f"the gateway for {named} cannot start: {type(error).__name__}: {error}; ask whoever maintains it"
        ) from error
    for url in urls:
        logger.debug("listening  address=%s", url)
    return urls


def tell_gateways(gateways: "Iterable[Gateway]", call: "Callable[[Gateway], None]") -> None:
    """Call something of every gateway; one that fails keeps none of the others from it."""
    for gateway in gateways:
        try:
            call(gateway)
        except Exception:
            logger.exception("gateway failed while stopping  gateway=%s", type(gateway).__name__)
