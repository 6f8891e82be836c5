"""All gateways of a server: started one after the other, and stopped together."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from headrace.gateways.addresses import (
    NATIVE_SCHEMES,
    ListenAddress,
    parse_listen_address,
    tcp_address,
    unix_address,
)
from headrace.model.arguments import shown
from headrace.model.errors import GatewayUnavailable, HeadraceError, InvalidArgument, ListenFailed

if TYPE_CHECKING:
    from headrace.gateways.gateway import Gateway, GatewayContext, GatewayFactory, GatewayStatistics
    from headrace.server.settings import ServerSettings

logger = logging.getLogger("headrace.server")

Answer = TypeVar("Answer")
HTTP_SCHEMES = ("http", "https")


def listen_addresses(settings: "ServerSettings") -> list[ListenAddress]:
    """All addresses that settings name: host and port first, then `listen`, the Unix socket, and HTTP.

    With a certificate, host and port and the address of HTTP speak TLS; a URL in `listen` tells by its scheme.
    """
    from headrace.gateways.unix_socket import PATH_BYTES_MAX

    tls = bool(settings.tls_certificate)
    addresses = [tcp_address(settings.host, settings.port, tls=tls)] if settings.host else []
    addresses += map(parse_listen_address, settings.listen)
    addresses += [unix_address(settings.socket_path)] if settings.socket_path else []
    scheme = "https" if tls else "http"
    addresses += [parse_listen_address(f"{scheme}://{settings.http_address}")] if settings.http_address else []
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
    http = [address for address in addresses if address.scheme in HTTP_SCHEMES]
    others = [address for address in addresses if address not in native and address not in http]
    own: dict[GatewayFactory, list[ListenAddress]] = {NativeGateway: native}
    if http:
        own[_load_http(http)] = http
    return {**own, **load_factories(others)}


def _load_http(addresses: Sequence[ListenAddress]) -> "GatewayFactory":
    """The gateway of HTTP, which needs packages that are not installed with the rest."""
    from headrace.gateways.http.installation import missing_packages

    missing = missing_packages()
    if missing:
        raise GatewayUnavailable(
            f"cannot listen on {addresses[0]}: HTTP needs {' and '.join(missing)}; install them with "
            "pip install 'headrace[http]'",
            scheme=addresses[0].scheme,
        )
    from headrace.gateways.http.gateway import HttpGateway

    return HttpGateway


async def start_gateway(
    factory: "GatewayFactory",
    context: "GatewayContext",
    addresses: Sequence[ListenAddress],
    made: "Callable[[Gateway], None]",
) -> list[str]:
    """Make a gateway, pass it to `made`, and start it; returns the URLs on which it listens."""
    from headrace.gateways.plugins import gateway_failed, make_gateway

    gateway = make_gateway(factory, context, addresses)
    made(gateway)  # before it starts: whatever happens now, it is closed with the others
    named = ", ".join(map(str, addresses))
    try:
        urls: object = await gateway.start()
    except HeadraceError:
        raise
    except OSError as error:
        raise ListenFailed(f"cannot listen on {named}: {error}; give another address with --listen") from error
    except (Exception, SystemExit) as error:
        text = f"cannot start: {type(error).__name__}: {error}"
        raise gateway_failed(factory, addresses, text) from error
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        text = f"is faulty: `start` must return a list of URLs, not {shown(urls)}"
        raise gateway_failed(factory, addresses, text)
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


def any_busy(gateways: "Iterable[Gateway]") -> bool:
    """Whether a gateway has requests without answers; nobody waits for one that fails to tell."""
    return any(_asked(gateway, lambda gateway: bool(gateway.busy), False) for gateway in gateways)


def gateway_statistics(gateways: "Iterable[Gateway]") -> "list[GatewayStatistics]":
    """What all gateways tell about their connections; one that fails to tell has none."""
    from headrace.gateways.gateway import GatewayStatistics

    return [
        _asked(gateway, lambda gateway: GatewayStatistics(*gateway.statistics()), GatewayStatistics(0, 0))
        for gateway in gateways
    ]


def _asked(gateway: "Gateway", question: "Callable[[Gateway], Answer]", otherwise: Answer) -> Answer:
    try:
        return question(gateway)
    except Exception:
        # Asked many times a second: the traceback is for whoever looks for it.
        logger.debug("gateway failed to tell its state  gateway=%s", type(gateway).__name__, exc_info=True)
        return otherwise
