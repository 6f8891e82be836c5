"""Clients that are known by their certificate: what it may name, and a session that ends when it does."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import make_ca, tls_broker, url_of

import headrace
from headrace import errors
from headrace.security.development_ca import CertificateFiles, DevelopmentCa
from headrace.server import EmbeddedServer

WAIT_S = 20.0
_DAY_S = 86_400


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> DevelopmentCa:
    return make_ca(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def broker(ca: DevelopmentCa, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A broker with security that knows clients by their certificates."""
    files = ca.make_server()
    with tls_broker(files, tls_client_ca=files.ca, unix_socket=str(tmp_path / "s")) as server:
        with headrace.connect(f"headrace+unix://{tmp_path / 's'}") as bus:
            bus.create_topic("orders")
            bus.auth.bind("publisher", "*")
            bus.auth.enable()
        yield server


def connect(broker: EmbeddedServer, files: CertificateFiles) -> Any:
    return headrace.connect(url_of(broker), ca=files.ca, certificate=files.certificate, key=files.key)


def publish_until(bus: Any, end_s: float) -> None:
    while time.time() < end_s:
        bus.publish("orders", b"y")
        time.sleep(0.1)


@pytest.mark.parametrize("name", ["a*", "adm in", "an?", "local", "anonymous"])
def test_a_certificate_names_only_what_a_token_could(broker: EmbeddedServer, ca: DevelopmentCa, name: str) -> None:
    files = ca.make_client(name, files=("odd.pem", "odd-key.pem"))
    with pytest.raises(errors.NotAuthenticated, match="names no identity"), connect(broker, files):
        pass


@pytest.mark.long
def test_a_session_ends_with_its_certificate(broker: EmbeddedServer, ca: DevelopmentCa) -> None:
    begins = datetime.now(UTC).replace(microsecond=0)
    files = ca.make_client("ann", not_before=begins, days=6 / _DAY_S)
    ends_s = begins.timestamp() + 6
    with connect(broker, files) as bus:
        who = bus.auth.who_am_i()
        assert (who.identity, who.expires_us) == ("ann", round(ends_s * 1e6))
        assert bus.publish("orders", b"x").offset == 0
        with pytest.raises(errors.HeadraceError):
            publish_until(bus, ends_s + WAIT_S)
        assert time.time() >= ends_s
