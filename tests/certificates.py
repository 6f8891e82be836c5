"""Certificates for tests, made by the development CA, and a broker that uses them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.security.development_ca import CertificateFiles, DevelopmentCa
from headrace.server import EmbeddedServer


def make_ca(directory: Path) -> DevelopmentCa:
    """A CA in a directory; skips the test where the package is missing that makes it."""
    pytest.importorskip("cryptography", reason="the extra security is not installed: there is no cryptography")
    return DevelopmentCa(str(directory))


@contextmanager
def tls_broker(files: CertificateFiles, *, loop: str = "uvloop", **settings: Any) -> Iterator[EmbeddedServer]:
    """A broker in memory that listens on loopback with TLS, on either event loop."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    with pytest.MonkeyPatch.context() as patch:
        if loop == "asyncio":
            patch.setattr("headrace.server.embedded.new_event_loop", asyncio.new_event_loop)
        chosen: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "tls_certificate": files.certificate}
        server = EmbeddedServer(":memory:", **{**chosen, "tls_key": files.key, **settings})
    try:
        yield server
    finally:
        server.close()


def port_of(server: EmbeddedServer) -> int:
    """The port of the native protocol."""
    return int(server._server.addresses[0][1])


def url_of(server: EmbeddedServer, scheme: str = "headraces", host: str = "127.0.0.1") -> str:
    """The address of the native protocol."""
    return f"{scheme}://{host}:{port_of(server)}"
