"""TLS between real clients and real brokers: who trusts whom, what each side is told, and certificates that change."""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.certificates import make_ca, port_of, tls_broker, url_of
from tests.http_client import needs_http

import headrace
from headrace import errors
from headrace.gateways import tls_certificates, tls_listener
from headrace.gateways.authentication import Peer
from headrace.gateways.builtin_authenticator import BuiltinAuthenticator
from headrace.model.identity import Identity
from headrace.security.certificates import identity_name
from headrace.security.development_ca import CertificateFiles, DevelopmentCa
from headrace.server import EmbeddedServer
from headrace.server.settings import server_settings

WAIT_S = 20.0
Attempt = Callable[..., None]


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> DevelopmentCa:
    return make_ca(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> DevelopmentCa:
    """A CA that nobody trusts."""
    return make_ca(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def files(ca: DevelopmentCa) -> CertificateFiles:
    """A certificate for this machine."""
    return ca.make_server()


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def broker(request: pytest.FixtureRequest, files: CertificateFiles) -> Iterator[EmbeddedServer]:
    with tls_broker(files, loop=request.param) as server:
        yield server


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def strict_broker(request: pytest.FixtureRequest, files: CertificateFiles) -> Iterator[EmbeddedServer]:
    """A broker that demands client certificates."""
    with tls_broker(files, loop=request.param, tls_client_ca=files.ca, tls_client_required=True) as server:
        yield server


@pytest.fixture(params=["sync", "async"])
def attempt(request: pytest.FixtureRequest) -> Attempt:
    """Connects, asks for something and leaves, with either face of the client."""

    async def connect_async(*given: Any, **named: Any) -> None:
        async with await headrace.connect_async(*given, **named) as bus:
            await bus.info()

    def connect(*given: Any, **named: Any) -> None:
        if request.param == "async":
            asyncio.run(connect_async(*given, **named))
        else:
            with headrace.connect(*given, **named) as bus:
                bus.info()

    return connect


def eventually(reached: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Whom clients trust.


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_client_that_knows_the_ca_connects(
    broker: EmbeddedServer, files: CertificateFiles, attempt: Attempt, host: str
) -> None:
    attempt(url_of(broker, host=host), ca=files.ca)
    attempt(url_of(broker, host=host), ca=Path(files.ca))
    attempt(f"{url_of(broker, host=host)}?ca={files.ca}")


def test_the_environment_names_the_files(
    strict_broker: EmbeddedServer, ca: DevelopmentCa, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = ca.make_client("ann")
    monkeypatch.setenv("HEADRACE_CA", ann.ca)
    monkeypatch.setenv("HEADRACE_CERTIFICATE", ann.certificate)
    monkeypatch.setenv("HEADRACE_KEY", ann.key)
    attempt(url_of(strict_broker))
    with headrace.open(":memory:", host="127.0.0.1", port=0) as bus:  # and says nothing about plain connections
        attempt(next(url for url in bus.info().listening if url.startswith("headrace://")))


def test_an_unknown_ca_is_refused(broker: EmbeddedServer, stranger: DevelopmentCa, attempt: Attempt) -> None:
    with pytest.raises(errors.TlsFailed, match=r"no CA trusted here.*give its CA as ca"):
        attempt(url_of(broker), wait=WAIT_S)  # which it does not: waiting does not help
    with pytest.raises(errors.TlsFailed, match="no CA trusted here"):
        attempt(url_of(broker), ca=stranger.certificate)


def test_a_wrong_name_is_refused(ca: DevelopmentCa, attempt: Attempt) -> None:
    elsewhere = ca.make_server(["broker.example.org"], files=("elsewhere.pem", "elsewhere-key.pem"))
    with tls_broker(elsewhere) as server:
        with pytest.raises(errors.TlsFailed, match=r"mismatch.*127.0.0.1.*server_name"):
            attempt(url_of(server), ca=elsewhere.ca)
        with pytest.raises(errors.TlsFailed, match=r"mismatch.*localhost.*server_name"):
            attempt(url_of(server, host="localhost"), ca=elsewhere.ca)
        attempt(url_of(server), ca=elsewhere.ca, server_name="broker.example.org")


@pytest.mark.parametrize(("start_days", "told"), [(-30.0, "has expired"), (30.0, "is not valid yet")])
def test_a_certificate_out_of_its_time_is_refused(
    ca: DevelopmentCa, attempt: Attempt, caplog: pytest.LogCaptureFixture, start_days: float, told: str
) -> None:
    start = datetime.now(UTC) + timedelta(days=start_days)
    old = ca.make_server(not_before=start, days=10, files=("old.pem", "old-key.pem"))
    with (
        caplog.at_level("ERROR", "headrace.tls"),
        tls_broker(old) as server,
        pytest.raises(errors.TlsFailed, match=told),
    ):
        attempt(url_of(server), ca=old.ca)
    assert [record.getMessage() for record in caplog.records if told in record.getMessage()]


def test_files_that_cannot_be_used_are_named(
    broker: EmbeddedServer, files: CertificateFiles, ca: DevelopmentCa, attempt: Attempt, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    ann, bob = ca.make_client("ann"), ca.make_client("bob")
    for options in (
        {"ca": str(tmp_path / "missing.pem")},
        {"ca": str(wrong)},
        {"ca": files.ca, "certificate": str(wrong)},
        {"ca": files.ca, "certificate": ann.certificate, "key": str(tmp_path / "missing.pem")},
        {"ca": files.ca, "certificate": ann.certificate, "key": bob.key},
    ):
        with pytest.raises(errors.InvalidArgument, match=r"(ca|certificate|key): .*\.pem cannot be used"):
            attempt(url_of(broker), wait=WAIT_S, **options)
    with pytest.raises(errors.InvalidArgument, match="give certificate, too"):
        attempt(url_of(broker), key=ann.key)
    for plain in (url_of(broker, "headrace"), "headrace+unix:///run/headrace.sock"):
        with pytest.raises(errors.InvalidArgument, match="cannot have ca"):
            attempt(plain, ca=files.ca)


def test_nothing_turns_verification_off() -> None:
    for url in ("headraces://localhost?verify=no", "headraces://localhost?insecure=1"):
        with pytest.raises(errors.InvalidArgument, match="ca, certificate, key, server_name"):
            headrace.connect(url)


# Whom brokers trust.


def test_a_missing_client_certificate_is_told(
    strict_broker: EmbeddedServer, files: CertificateFiles, attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "headrace.tls"):  # until the broker has logged it, a moment after the client knows
        with pytest.raises(errors.TlsFailed, match="demands a client certificate"):
            attempt(url_of(strict_broker), ca=files.ca)
        eventually(lambda: "did not return a certificate" in caplog.text)


def test_a_client_certificate_of_another_ca_is_refused(
    strict_broker: EmbeddedServer, files: CertificateFiles, stranger: DevelopmentCa, attempt: Attempt
) -> None:
    eve = stranger.make_client("eve")
    with pytest.raises(errors.TlsFailed, match="does not accept the client certificate"):
        attempt(url_of(strict_broker), ca=files.ca, certificate=eve.certificate, key=eve.key)


def test_an_expired_client_certificate_is_refused(
    strict_broker: EmbeddedServer, files: CertificateFiles, ca: DevelopmentCa, attempt: Attempt
) -> None:
    start = datetime.now(UTC) - timedelta(days=30)
    old = ca.make_client("ann", not_before=start, days=10, files=("old-ann.pem", "old-ann-key.pem"))
    with pytest.raises(errors.TlsFailed, match="does not accept the client certificate"):
        attempt(url_of(strict_broker), ca=files.ca, certificate=old.certificate, key=old.key)


def test_a_certificate_for_servers_is_none_for_clients(
    strict_broker: EmbeddedServer, files: CertificateFiles, attempt: Attempt
) -> None:
    with pytest.raises(errors.TlsFailed, match="does not accept the client certificate"):
        attempt(url_of(strict_broker), ca=files.ca, certificate=files.certificate, key=files.key)


@needs_http
def test_a_client_certificate_reaches_the_authenticator(
    files: CertificateFiles, ca: DevelopmentCa, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def authenticate(self: object, mechanism: str, credentials: bytes, peer: Peer) -> Identity:  # noqa: ARG001
        name = "" if peer.certificate is None else identity_name(peer.certificate)
        assert mechanism == ("certificate" if name else "anonymous")
        assert not name or credentials == ssl.PEM_cert_to_DER_cert(Path(ann.certificate).read_text())
        seen.append((mechanism, name))
        return Identity(name or "anonymous")

    monkeypatch.setattr(BuiltinAuthenticator, "__call__", authenticate)
    ann = ca.make_client("ann")
    with tls_broker(files, tls_client_ca=files.ca, http_address="127.0.0.1:0") as server:
        for url in (url_of(server), server._server.listening[-1]):
            attempt(url, ca=files.ca, certificate=ann.certificate, key=ann.key)
            attempt(url, ca=files.ca)  # it is asked for, and not demanded
        context = ssl.create_default_context(cafile=files.ca)
        context.load_cert_chain(ann.certificate, ann.key)
        with urllib.request.urlopen(f"{server._server.listening[-1]}/v1/topics", context=context) as answer:
            assert answer.status == 200
    assert seen == [("certificate", "ann"), ("anonymous", "")] * 2 + [("certificate", "ann")]


# Versions, and the wrong protocol.


@pytest.mark.parametrize("options", [["-tls1_1"], ["-tls1"], ["-tls1_2", "-cipher", "AES128-SHA"]])
def test_old_versions_and_weak_ciphers_are_refused(
    broker: EmbeddedServer, files: CertificateFiles, options: list[str]
) -> None:
    weakened = [*options] if "-cipher" in options else [*options, "-cipher", "ALL:@SECLEVEL=0"]
    said = s_client(broker, files, *weakened)
    assert "Cipher is (NONE)" in said
    assert "alert protocol version" in said or "alert handshake failure" in said


def test_openssl_agrees_on_version_and_protocol(broker: EmbeddedServer, files: CertificateFiles) -> None:
    said = s_client(broker, files, "-alpn", "headrace/1", "-verify_return_error")
    assert "TLSv1.3" in said
    assert "ALPN protocol: headrace/1" in said
    assert "Verify return code: 0 (ok)" in said
    assert "TLSv1.2" in s_client(broker, files, "-tls1_2", "-verify_return_error")


def test_a_broker_may_demand_1_3(files: CertificateFiles, attempt: Attempt) -> None:
    with tls_broker(files, tls_min_version="1.3") as server:
        assert "alert protocol version" in s_client(server, files, "-tls1_2")
        attempt(url_of(server), ca=files.ca)


def s_client(server: EmbeddedServer, files: CertificateFiles, *options: str) -> str:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    address = f"127.0.0.1:{port_of(server)}"
    command = ["openssl", "s_client", "-connect", address, "-CAfile", files.ca, *options]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    return done.stdout + done.stderr


def test_plain_to_tls_names_the_fix(broker: EmbeddedServer, attempt: Attempt) -> None:
    with pytest.raises(errors.TlsFailed, match="headraces:// instead of headrace://"):
        attempt(url_of(broker, "headrace"), wait=WAIT_S)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_tls_to_plain_names_the_fix(files: CertificateFiles, attempt: Attempt, loop: str) -> None:
    with (
        tls_broker(files, loop=loop, tls_certificate="", tls_key="") as server,
        pytest.raises(errors.TlsFailed, match=r"speaks no TLS.*headrace:// instead of headraces://"),
    ):
        attempt(url_of(server), ca=files.ca, wait=WAIT_S)


def test_other_bytes_end_the_connection(broker: EmbeddedServer) -> None:
    for data in (b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\x16nonsense" * 10):
        with socket.create_connection(("127.0.0.1", port_of(broker)), WAIT_S) as client:
            client.sendall(data)
            while client.recv(4096):
                pass


# Handshakes that do not end.


@pytest.mark.parametrize("data", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"], ids=["none", "one", "some"])
def test_a_slow_handshake_is_ended(
    files: CertificateFiles, attempt: Attempt, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    with (
        caplog.at_level("INFO", "headrace.tls"),
        tls_broker(files, tls_handshake_seconds=0.3) as server,
        socket.create_connection(("127.0.0.1", port_of(server)), WAIT_S) as client,
    ):
        client.sendall(data)
        attempt(url_of(server), ca=files.ca)  # meanwhile others are served
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
        eventually(lambda: "TLS handshake timed out" in caplog.text)


def test_unfinished_handshakes_make_room_for_others(
    files: CertificateFiles, attempt: Attempt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls_listener, "TLS_HANDSHAKES_MAX", 8)
    with tls_broker(files) as server:
        with caplog.at_level("WARNING", "headrace.tls"):
            idle = [socket.create_connection(("127.0.0.1", port_of(server)), WAIT_S) for _ in range(20)]
            attempt(url_of(server), ca=files.ca)
        for client in idle[:12]:  # the oldest
            assert client.recv(1) == b""
        for client in idle:
            client.close()
    assert "too many unfinished TLS handshakes" in caplog.text


def test_a_client_that_goes_in_the_middle_harms_nobody(
    broker: EmbeddedServer, files: CertificateFiles, attempt: Attempt
) -> None:
    context = ssl.create_default_context(cafile=files.ca)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    hello = outgoing.read()
    for part in (hello[:1], hello[:100], hello):
        with socket.create_connection(("127.0.0.1", port_of(broker)), WAIT_S) as connection:
            connection.sendall(part)
    attempt(url_of(broker), ca=files.ca)


# Certificates that change.


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets brokers look at their files often."""
    monkeypatch.setattr(tls_certificates, "_CHECK_S", 0.1)


@pytest.mark.usefixtures("watchful")
def test_certificates_are_reloaded_while_clients_are_connected(
    tmp_path: Path, stranger: DevelopmentCa, attempt: Attempt
) -> None:
    ca = make_ca(tmp_path)
    files = ca.make_server()
    with tls_broker(files) as server, headrace.connect(url_of(server), ca=files.ca) as bus:
        bus.publish("orders", b"1")
        other = stranger.make_server()
        shutil.copy(other.certificate, files.certificate)
        shutil.copy(other.key, files.key)
        eventually(lambda: served_by(server, stranger.certificate))
        bus.publish("orders", b"2")  # the connection of before goes on
        assert bus.describe_topic("orders").partitions[0].next_offset == 2
        with pytest.raises(errors.TlsFailed, match="no CA trusted here"):
            attempt(url_of(server), ca=files.ca)
        attempt(url_of(server), ca=stranger.certificate)


@pytest.mark.usefixtures("watchful")
def test_a_broken_certificate_keeps_the_old_one(
    tmp_path: Path, attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    ca = make_ca(tmp_path)
    files = ca.make_server()
    with caplog.at_level("INFO", "headrace.tls"), tls_broker(files) as server:
        key = Path(files.key).read_bytes()
        Path(files.key).write_text("broken")
        eventually(lambda: "certificates not reloaded" in caplog.text)
        assert files.certificate in caplog.text
        attempt(url_of(server), ca=files.ca)
        os.unlink(files.key)
        attempt(url_of(server), ca=files.ca)
        Path(files.key).write_bytes(key)
        eventually(lambda: "certificates reloaded" in caplog.text)
        attempt(url_of(server), ca=files.ca)
        assert key.decode() not in caplog.text


@pytest.mark.usefixtures("watchful")
def test_a_certificate_that_is_not_valid_now_replaces_none_that_is(
    tmp_path: Path, attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    ca, now = make_ca(tmp_path), datetime.now(UTC)
    files = ca.make_server()
    with caplog.at_level("INFO", "headrace.tls"), tls_broker(files) as server:
        ca.make_server(not_before=now - timedelta(days=2), days=1)
        eventually(lambda: "certificates not reloaded" in caplog.text)
        assert "has expired" in caplog.text
        attempt(url_of(server), ca=files.ca)
        caplog.clear()
        ca.make_server(not_before=datetime.now(UTC) + timedelta(seconds=2))
        eventually(lambda: "is not valid yet" in caplog.text)
        attempt(url_of(server), ca=files.ca)
        eventually(lambda: "certificates reloaded" in caplog.text)  # as soon as it is valid
        attempt(url_of(server), ca=files.ca)


@pytest.mark.usefixtures("watchful")
def test_a_removed_client_ca_lets_nobody_in(tmp_path: Path, attempt: Attempt, stranger: DevelopmentCa) -> None:
    ca = make_ca(tmp_path)
    files, ann = ca.make_server(), ca.make_client("ann")
    accepted = tmp_path / "accepted.pem"
    shutil.copy(ca.certificate, accepted)
    options = {"ca": files.ca, "certificate": ann.certificate, "key": ann.key}
    with tls_broker(files, tls_client_ca=str(accepted), tls_client_required=True) as server:
        attempt(url_of(server), **options)
        shutil.copy(stranger.certificate, accepted)
        eventually(lambda: refused(attempt, url_of(server), options))


def refused(attempt: Attempt, url: str, options: dict[str, str]) -> bool:
    try:
        attempt(url, **options)
    except errors.TlsFailed:
        return True
    return False


def served_by(server: EmbeddedServer, ca: str) -> bool:
    try:
        with headrace.connect(url_of(server), ca=ca):
            return True
    except errors.TlsFailed:
        return False


def test_certificates_are_chosen_by_name(ca: DevelopmentCa, files: CertificateFiles, tmp_path: Path) -> None:
    other = ca.make_server(["*.example.org", "example.net"], files=("other.pem", "other-key.pem"))
    both = tmp_path / "both.pem"
    both.write_bytes(Path(other.certificate).read_bytes() + Path(other.key).read_bytes())
    with tls_broker(files, tls_sni_certificates=[str(both)]) as server:
        for name, chosen in (
            ("broker.example.org", other),
            ("EXAMPLE.NET", other),
            ("localhost", files),
            ("unknown.example.com", files),
        ):
            assert certificate_for(server, files.ca, name) == ssl.PEM_cert_to_DER_cert(
                Path(chosen.certificate).read_text()
            )


def certificate_for(server: EmbeddedServer, ca: str, name: str) -> bytes | None:
    context = ssl.create_default_context(cafile=ca)
    context.check_hostname = False
    with (
        socket.create_connection(("127.0.0.1", port_of(server)), WAIT_S) as connection,
        context.wrap_socket(connection, server_hostname=name) as encrypted,
    ):
        return encrypted.getpeercert(binary_form=True)


def test_a_certificate_that_ends_soon_is_reported(ca: DevelopmentCa, caplog: pytest.LogCaptureFixture) -> None:
    soon = ca.make_server(days=10, files=("soon.pem", "soon-key.pem"))
    with caplog.at_level("WARNING", "headrace.tls"), tls_broker(soon) as server:
        assert server._server.tls is not None
        (loaded,) = server._server.tls.certificates
        assert 9 < (loaded.not_after_s - time.time()) / 86_400 < 10
    assert len([record for record in caplog.records if "expires soon" in record.getMessage()]) == 1


def test_a_certificate_that_ends_while_it_is_used_is_reported_at_once(
    ca: DevelopmentCa, caplog: pytest.LogCaptureFixture
) -> None:
    short = ca.make_server(not_before=datetime.now(UTC), days=4 / 86_400, files=("short.pem", "short-key.pem"))
    with caplog.at_level("WARNING", "headrace.tls"), tls_broker(short):
        assert "expires soon" in caplog.text
        until_s = time.monotonic() + WAIT_S
        while "has expired" not in caplog.text:
            assert time.monotonic() < until_s
            time.sleep(0.1)


# Settings.


def test_settings_that_do_not_fit_are_refused(files: CertificateFiles, ca: DevelopmentCa, tmp_path: Path) -> None:
    bob = ca.make_client("bob")
    password = tmp_path / "password"
    for chosen, told in (
        ({"listen": ["headraces://127.0.0.1:0"]}, "headraces://127.0.0.1:0 needs tls_certificate"),
        ({"listen": ["https://127.0.0.1:0"]}, "https://127.0.0.1:0 needs tls_certificate"),
        ({"tls_key": files.key}, "tls_key needs tls_certificate"),
        ({"tls_certificate": files.certificate, "tls_client_required": True}, "needs tls_client_ca"),
        ({"tls_certificate": files.certificate, "tls_min_version": "1.1"}, "tls_min_version must be one of 1.2, 1.3"),
        ({"tls_certificate": files.certificate, "tls_client_names": ["serial"]}, "tls_client_names must be one of"),
    ):
        with pytest.raises(errors.InvalidArgument, match=told):
            server_settings({"data": ":memory:", **chosen})
    for chosen, told in (
        ({"tls_certificate": str(tmp_path / "none.pem")}, "tls_certificate: .*none.pem cannot be used"),
        ({"tls_certificate": files.certificate}, "cannot be used"),  # it has no key
        ({"tls_certificate": files.certificate, "tls_key": bob.key}, "bob-key.pem is not the private key"),
        ({"tls_certificate": bob.certificate, "tls_key": bob.key}, "must be a certificate for TLS servers"),
        ({"tls_certificate": files.certificate, "tls_key": encrypted(files.key, tmp_path)}, "is encrypted"),
        (
            {
                "tls_certificate": files.certificate,
                "tls_key": encrypted(files.key, tmp_path),
                "tls_key_password_file": str(password),
            },
            "tls_key_password_file: .*password cannot be used",
        ),
    ):
        with pytest.raises(errors.InvalidArgument, match=told):
            EmbeddedServer(":memory:", host="127.0.0.1", port=0, **chosen)


def test_an_encrypted_key_needs_its_password(files: CertificateFiles, tmp_path: Path, attempt: Attempt) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    options = {"tls_key": encrypted(files.key, tmp_path), "tls_key_password_file": str(password)}
    with tls_broker(files, **options) as server:
        attempt(url_of(server), ca=files.ca)
    with pytest.raises(errors.InvalidArgument, match=r"encrypted\.pem is encrypted"):
        attempt("headraces://127.0.0.1:1", certificate=files.certificate, key=options["tls_key"])


def encrypted(key: str, directory: Path) -> str:
    """The same key, with the password `secret`."""
    from cryptography.hazmat.primitives import serialization

    loaded = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    path = directory / "encrypted.pem"
    path.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    return str(path)


# Much data.


def test_many_threads_send_and_receive_much(broker: EmbeddedServer, files: CertificateFiles) -> None:
    """Writers fill the connection while the reader's thread is busy: partial writes must lose and repeat nothing."""
    values = [os.urandom(200_000) for _ in range(8)]
    topic = f"much-{id(broker)}"
    with headrace.connect(url_of(broker), ca=files.ca) as bus:
        bus.create_topic(topic, partitions=8)

        def work(number: int) -> None:
            for _ in range(10):
                bus.publish(topic, values[number], partition=number)
                bus.publish_many(topic, [b"%d" % number] * 50, partition=number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with bus.subscribe(topic, group="g", timeout=WAIT_S) as messages:
            received = [next(iter(messages)) for _ in range(8 * 10 * 51)]
    for number in range(8):
        own = [message.value for message in received if message.partition == number]
        assert own == [values[number], *[b"%d" % number] * 50] * 10


def test_asyncio_sends_and_receives_much(broker: EmbeddedServer, files: CertificateFiles) -> None:
    value = os.urandom(1_000_000)
    topic = f"more-{id(broker)}"

    async def story() -> None:
        async with await headrace.connect_async(url_of(broker), ca=files.ca) as bus:
            await asyncio.gather(*(bus.publish(topic, value) for _ in range(16)))
            async with bus.subscribe(topic, group="g", timeout=WAIT_S) as messages:
                async for message in messages:
                    assert message.value == value
                    if message.offset == 15:
                        break

    asyncio.run(story())


def test_small_frames_share_records(
    broker: EmbeddedServer, files: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that are published in one turn of the loop do not make a TLS record each."""
    written: list[int] = []

    class Counting(ssl.SSLObject):
        def write(self, data: Any) -> int:
            written.append(len(data))
            return super().write(data)

    monkeypatch.setattr(ssl.SSLContext, "sslobject_class", Counting)
    topic = f"small-{id(broker)}"

    async def story() -> None:
        async with await headrace.connect_async(url_of(broker), ca=files.ca) as bus:
            await bus.create_topic(topic)
            written.clear()
            await asyncio.gather(*(bus.publish(topic, b"x") for _ in range(200)))

    asyncio.run(story())
    assert len(written) < 50


def test_a_forked_child_uses_a_connection_of_its_own(broker: EmbeddedServer, files: CertificateFiles) -> None:
    with headrace.connect(url_of(broker), ca=files.ca) as bus:
        bus.info()
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(write, bus.info().broker_id.encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 100).decode() == bus.info().broker_id
        os.close(read)
        os.close(write)


def test_a_refusal_arrives_over_tls(files: CertificateFiles, attempt: Attempt) -> None:
    with (
        tls_broker(files, connections_max=1) as server,
        headrace.connect(url_of(server), ca=files.ca),
        pytest.raises(errors.LimitExceeded, match="1 connections already"),
    ):
        attempt(url_of(server), ca=files.ca)


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=8), st.integers(1, 700))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_broken_hello_harms_nobody(
    broker: EmbeddedServer, files: CertificateFiles, changes: list[tuple[int, int]], length: int
) -> None:
    client = ssl.create_default_context(cafile=files.ca)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        client.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    hello = bytearray(outgoing.read())
    for position, byte in changes:
        hello[position % len(hello)] = byte
    with socket.create_connection(("127.0.0.1", port_of(broker)), WAIT_S) as connection:
        connection.sendall(hello[:length])
    with headrace.connect(url_of(broker), ca=files.ca) as bus:
        bus.info()


# HTTP.


@needs_http
def test_a_malformed_request_is_answered_and_its_connection_ends(files: CertificateFiles) -> None:
    with tls_broker(files, http_address="127.0.0.1:0") as server:
        port = int(server._server.listening[-1].rpartition(":")[2])
        context = ssl.create_default_context(cafile=files.ca)
        with (
            socket.create_connection(("127.0.0.1", port), WAIT_S) as connection,
            context.wrap_socket(connection, server_hostname="localhost") as encrypted,
        ):
            encrypted.sendall(b"no request\r\n\r\n")
            answer = b""
            while data := encrypted.recv(4096):  # an end that is not announced would raise
                answer += data
        assert answer.startswith(b"HTTP/1.1 400")


@needs_http
def test_metrics_tell_of_certificates_and_handshakes(files: CertificateFiles, attempt: Attempt) -> None:
    with tls_broker(files, http_address="127.0.0.1:0") as server:
        with pytest.raises(errors.TlsFailed):
            attempt(url_of(server))
        attempt(url_of(server), ca=files.ca)
        context = ssl.create_default_context(cafile=files.ca)
        with urllib.request.urlopen(f"{server._server.listening[-1]}/metrics", context=context) as answer:
            text = answer.read().decode()
    assert f'headrace_tls_certificate_expiry_timestamp_seconds{{path="{files.certificate}"}}' in text
    assert re.search(r"^headrace_tls_handshakes_total [12]$", text, re.MULTILINE)  # perhaps with that of the scrape
    assert "headrace_tls_failed_handshakes_total 1\n" in text


@needs_http
def test_curl_speaks_https(files: CertificateFiles, ca: DevelopmentCa) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    ann = ca.make_client("ann")
    with tls_broker(files, http_address="127.0.0.1:0", tls_client_ca=files.ca, tls_client_required=True) as server:
        url = server._server.listening[-1]
        assert url.startswith("https://")
        url = f"https://localhost:{url.rpartition(':')[2]}"
        trusting, known = ["--cacert", files.ca], ["--cert", ann.certificate, "--key", ann.key]
        message = ["-H", "content-type: application/json", "-d", '{"value": "3 apples"}']
        post = ["-X", "POST", *message, f"{url}/v1/topics/orders/messages"]
        assert '"offset":0' in curl(*trusting, *known, *post)
        assert curl(*trusting, *known, f"{url}/v1/topics/orders").startswith("{")
        assert "ALPN: server accepted http/1.1" in curl("-v", *trusting, *known, f"{url}/v1/topics").replace(
            "ALPN, server accepted to use http/1.1", "ALPN: server accepted http/1.1"
        )
        assert "certificate required" in curl(*trusting, f"{url}/v1/topics")
        assert "SSL certificate problem" in curl(*known, f"{url}/v1/topics")
        assert "this port speaks HTTPS" in curl(url.replace("https", "http"))
        own = f"https://localhost:{url.rpartition(':')[2]}"
        assert curl(*trusting, *known, "-H", f"Origin: {own}", f"{url}/v1/topics").startswith("{")  # a page of its own
        foreign = curl(*trusting, *known, "-H", "Origin: https://example.org", f"{url}/v1/topics")
        assert "origin_refused" in foreign


@needs_http
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_the_native_protocol_goes_through_https(files: CertificateFiles, attempt: Attempt, loop: str) -> None:
    value = os.urandom(1_000_000)
    with tls_broker(files, loop=loop, http_address="127.0.0.1:0") as server:
        url = server._server.listening[-1]
        attempt(url, ca=files.ca)
        with pytest.raises(errors.TlsFailed, match="no CA trusted here"):
            attempt(url, wait=WAIT_S)
        with pytest.raises(errors.ConnectionFailed, match="write https:// instead of http://"):
            attempt(url.replace("https", "http"))
        with headrace.connect(url, ca=files.ca) as bus:
            for _ in range(5):
                bus.publish("orders", value)
            with bus.subscribe("orders", group="g", timeout=WAIT_S) as messages:
                assert [next(iter(messages)).value == value for _ in range(5)] == [True] * 5


def curl(*words: str) -> str:
    done = subprocess.run(["curl", "-sS", *words], capture_output=True, text=True, timeout=WAIT_S, check=False)
    return done.stdout or done.stderr if "-v" not in words else done.stdout + done.stderr


def test_a_listener_may_be_plain_beside_one_with_tls(files: CertificateFiles, attempt: Attempt) -> None:
    addresses = ["headraces://127.0.0.1:0", "headrace://127.0.0.1:0"]
    with tls_broker(files, host="", listen=addresses) as server:
        first, second = server._server.listening
        assert first.startswith("headraces://")
        attempt(first, ca=files.ca)
        attempt(second)


def test_logs_tell_addresses_and_no_keys(
    files: CertificateFiles, ca: DevelopmentCa, attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    ann = ca.make_client("ann")
    with caplog.at_level(logging.DEBUG), tls_broker(files, tls_client_ca=files.ca) as server:
        attempt(url_of(server), ca=files.ca, certificate=ann.certificate, key=ann.key)
        with headrace.connect(url_of(server), ca=files.ca, certificate=ann.certificate, key=ann.key) as bus:
            assert ann.key not in repr(bus)
    secret = Path(ann.key).read_text().splitlines()[1]
    assert secret not in caplog.text
    assert ann.key not in caplog.text
