"""Pieces of TLS: addresses with options, names in certificates, and a socket that takes little at a time."""

import os
import select
import socket
import ssl
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.certificates import make_ca

from headrace.client.connection.addresses import Address, parse_address, with_tenant, with_tls
from headrace.client.connection.tls_options import TlsOptions
from headrace.client.connection.tls_socket import TlsSocket
from headrace.gateways.addresses import parse_listen_address
from headrace.model.errors import InvalidArgument
from headrace.security.certificates import CertificateNames, certificate_names, identity_name, is_named

PATHS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), min_size=1, max_size=20)


@given(PATHS, PATHS, PATHS, st.sampled_from(["", "acme"]))
def test_an_address_carries_its_files(ca: str, certificate: str, key: str, tenant: str) -> None:
    address = Address("localhost", 7390, "", tenant, "headraces", "", TlsOptions(ca, certificate, key))
    assert parse_address(str(address)) == address
    assert parse_address(address.place).tls == TlsOptions()
    assert parse_address(with_tenant(str(address), "other")).tls == address.tls


@pytest.mark.parametrize(
    "text",
    [
        "headrace://localhost?ca=ca.pem",
        "http://localhost?ca=ca.pem",
        "headrace+unix:///run/headrace.sock?ca=ca.pem",
        "headraces://localhost?ca=",
        "headraces://localhost?ca=a&ca=b",
        "headraces://localhost?key=key.pem",
        "headraces://localhost?password=x",
        "headraces://localhost?ca=a%00b",
        "headraces://user@localhost",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_address(text)


def test_a_certificate_is_never_mixed_with_the_key_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CERTIFICATE", "env.pem")
    monkeypatch.setenv("HEADRACE_KEY", "env-key.pem")
    address = parse_address("headraces://localhost")
    assert with_tls(address, TlsOptions()).tls == TlsOptions("", "env.pem", "env-key.pem")
    assert with_tls(address, TlsOptions(certificate="own.pem")).tls == TlsOptions("", "own.pem", "")
    assert with_tls(parse_address("headrace://localhost"), TlsOptions()).tls == TlsOptions()


def test_listen_addresses_tell_whether_they_have_tls() -> None:
    for url, tls in (
        ("headrace://[::1]:1", False),
        ("headraces://[::1]:1", True),
        ("https://h:1", True),
        ("unix:///s", False),
    ):
        assert parse_listen_address(url).has_tls is tls
    assert parse_listen_address("headraces://localhost").port == 7390
    with pytest.raises(InvalidArgument):
        parse_listen_address("headraces://localhost/path")


def test_names_of_identities() -> None:
    names = CertificateNames(
        "ann", ("spiffe://x/ann", "headrace:billing"), ("a.example.org",), (), ("ann@example.org",)
    )
    assert identity_name(names) == "billing"
    assert identity_name(names, ["common_name", "uri"]) == "ann"
    assert identity_name(names, ["dns"]) == "a.example.org"
    assert identity_name(names, ["email"]) == "ann@example.org"
    assert identity_name(certificate_names({})) == ""
    assert not is_named(CertificateNames("localhost"), "localhost")  # a common name is no name of a host


def test_a_socket_that_takes_little_loses_nothing(tmp_path: Path) -> None:
    """The other side reads late: what was encrypted waits, and is sent once and in order."""
    files = make_ca(tmp_path).make_server()
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(files.certificate, files.key)
    near, far = socket.socketpair()
    for end in (near, far):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        end.settimeout(30)
    served: list[ssl.SSLSocket] = []
    accepting = threading.Thread(target=lambda: served.append(serving.wrap_socket(far, server_side=True)))
    accepting.start()
    client = TlsSocket(near, ssl.create_default_context(cafile=files.ca), "localhost")
    accepting.join()
    client.setblocking(False)
    parts = [os.urandom(size) for size in (1, 100, 20_000, 5, 1_000_000, 3, 60_000, 60_000)]
    wanted, taken, received = b"".join(parts), 0, bytearray()

    def receive() -> None:
        while len(received) < len(wanted):
            received.extend(served[0].recv(10_000))

    receiving = threading.Thread(target=receive)
    receiving.start()
    while taken < len(wanted) or client.unsent:
        left = memoryview(wanted)[taken:]
        try:
            taken += client.sendmsg([left[:7], left[7:30_000], left[30_000:]] if left else [])
        except BlockingIOError:
            assert client.unsent
            select.select([], [client], [], 30)
    receiving.join()
    assert bytes(received) == wanted
    with pytest.raises(BlockingIOError):
        client.recv_into(memoryview(bytearray(10)))
    sending = threading.Thread(target=lambda: served[0].sendall(wanted[:50_000]))
    sending.start()
    back = bytearray()
    while len(back) < 50_000:
        buffer = memoryview(bytearray(7_777))
        try:
            back += buffer[: client.recv_into(buffer)]
        except BlockingIOError:
            select.select([client], [], [], 30)
    sending.join()
    assert bytes(back) == wanted[:50_000]
    served[0].settimeout(0)
    with pytest.raises(ssl.SSLWantReadError):
        served[0].unwrap()  # announces the end
    served[0].settimeout(30)
    assert client.recv(1) == client.recv(1) == b""
    client.end()
    served[0].unwrap()  # has the answer
    client.close()
    served[0].close()
