"""The certificates of a server: loaded, tried in a handshake, chosen by name, and loaded again when files change."""

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.gateways.tls_handshake import HandshakeContext, HandshakeCounts
from headrace.gateways.tls_settings import HTTP_ALPN, NATIVE_ALPN, TlsSettings
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.metric_requests import MetricFamily, MetricSample, counter
from headrace.security.certificates import CertificateNames, certificate_names, is_named

if TYPE_CHECKING:
    from headrace.broker.metrics import CollectorSteps

logger = logging.getLogger("headrace.tls")

VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
EXPIRY_WARNING_S = 14 * 86_400
"""So long before the end of a certificate the log begins to warn of it, once a day."""
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2: forward secrecy and authenticated encryption only. All ciphers of TLS 1.3 are like that."""
_CHECK_S = 1.0
_WARN_AGAIN_S = 86_400
_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name."""


class LoadedCertificate(NamedTuple):
    """A certificate in use."""

    path: str
    names: CertificateNames
    not_before_s: float
    """Seconds since 1970, as is `not_after_s`."""
    not_after_s: float

    def is_valid(self, now_s: float) -> bool:
        """Whether a time is between its beginning and its end."""
        return self.not_before_s <= now_s < self.not_after_s


class _Loaded(NamedTuple):
    """Certificates with a context for each protocol.

    A reload makes another one of these, and replaces the old one only when it is complete.
    """

    certificates: list[LoadedCertificate]
    contexts: dict[str, ssl.SSLContext]


class TlsCertificates:
    """The certificates of a server, for all its gateways."""

    def __init__(self, settings: TlsSettings) -> None:
        """Load the certificates; raises InvalidArgument for one that cannot be used."""
        self.settings = settings
        self._loaded_stamp = self._seen_stamp = self._stamp()
        self._loaded = _load(settings)
        self._watching: asyncio.Task[None] | None = None
        self._reloading = asyncio.Lock()
        self.handshakes = HandshakeCounts()
        self.failed_reloads = 0
        self._reload_at_s: float | None = None
        """When certificates that were held back may have become the better ones."""
        self._warned: dict[tuple[str, float, bool], float] = {}
        self._warn_of_expiry(time.time())

    @property
    def certificates(self) -> list[LoadedCertificate]:
        """The certificates in use, with the time of their ends."""
        return self._loaded.certificates

    def context(self, protocol: str) -> ssl.SSLContext:
        """The context for a new connection of a protocol, named as in ALPN, with the newest certificates."""
        return self._loaded.contexts[protocol]

    def start(self) -> None:
        """Watch the files, on the loop that runs."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def stop(self) -> None:
        """Watch no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def reload(self) -> bool:
        """Load all files again; open connections go on.

        Keeps the certificates in use if one cannot be loaded, or if one is not valid now and the one in use is.
        """
        async with self._reloading:
            self._loaded_stamp = self._stamp()
            self._reload_at_s = None
            try:
                loaded = await asyncio.to_thread(_load, self.settings)
                self._check_valid(loaded.certificates, time.time())
                self._loaded = loaded
            except HeadraceError as error:
                self.failed_reloads += 1
                logger.error("certificates not reloaded; the old ones stay in use  reason=%s", error)
                return False
            logger.info("certificates reloaded  certificates=%s", ",".join(one.path for one in self.certificates))
            self._warn_of_expiry(time.time())
            return True

    def collect(self, tenant: str | None, now_us: int) -> "CollectorSteps":  # noqa: ARG002 the same at any time
        """Collect the metrics of TLS."""
        if tenant is not None:
            return  # it serves all tenants
        yield MetricFamily(
            "tls_certificate_expiry_timestamp_seconds",
            "gauge",
            "When certificates end, in seconds since 1970.",
            [MetricSample(one.not_after_s, {"path": one.path}) for one in self.certificates],
            "seconds",
        )
        yield counter("tls_handshakes", "TLS handshakes that were completed.", self.handshakes.completed)
        yield counter("tls_failed_handshakes", "TLS handshakes that failed.", self.handshakes.failed)
        yield counter("tls_failed_reloads", "Reloads of certificates that failed.", self.failed_reloads)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            stamp = self._stamp()
            is_written = stamp != self._loaded_stamp and stamp == self._seen_stamp  # whoever writes them has finished
            if is_written or (self._reload_at_s is not None and time.time() >= self._reload_at_s):
                await self.reload()
            self._seen_stamp = stamp
            self._warn_of_expiry(time.time())

    def _check_valid(self, new: Sequence[LoadedCertificate], now_s: float) -> None:
        """Refuse certificates of which one is not valid now and would replace one that is."""
        for old, one in zip(self.certificates, new, strict=True):
            if old.is_valid(now_s) and not one.is_valid(now_s):
                is_early = now_s < one.not_before_s
                self._reload_at_s = min(one.not_before_s, old.not_after_s) if is_early else old.not_after_s
                raise InvalidArgument(
                    f"tls_certificate: {one.path} {'is not valid yet' if is_early else 'has expired'}; it must be "
                    "valid now to replace one that is"
                )

    def _stamp(self) -> list[tuple[int, ...]]:
        """What changes when a file is replaced or written."""
        stamps: list[tuple[int, ...]] = []
        for path in self.settings.files:
            try:
                state = os.stat(path)
                stamps.append((state.st_ino, state.st_mtime_ns, state.st_size))
            except OSError:  # it is missing for now: loading it tells more
                stamps.append(())
        return stamps

    def _warn_of_expiry(self, now_s: float) -> None:
        for path, _, not_before_s, not_after_s in self.certificates:
            has_ended = now_s >= not_after_s
            warned_s = self._warned.get((path, not_after_s, has_ended), float("-inf"))
            if (now_s > not_before_s and not_after_s - now_s > EXPIRY_WARNING_S) or now_s - warned_s < _WARN_AGAIN_S:
                continue
            self._warned[path, not_after_s, has_ended] = now_s
            days = f"{abs(not_after_s - now_s) / 86_400:.1f}"
            if now_s <= not_before_s:
                logger.error("certificate is not valid yet; clients refuse it  path=%s", path)
            elif has_ended:
                logger.error(
                    "certificate has expired; clients refuse it: replace the file  path=%s days=%s", path, days
                )
            else:
                logger.warning("certificate expires soon: replace it  path=%s days_left=%s", path, days)


def _load(settings: TlsSettings) -> _Loaded:
    pairs = [(settings.certificate, settings.key), *((path, "") for path in settings.sni_certificates)]
    made = {
        protocol: [_context(settings, path, key, protocol) for path, key in pairs]
        for protocol in (NATIVE_ALPN, HTTP_ALPN)
    }
    certificates = [_inspected(path, context) for (path, _), context in zip(pairs, made[NATIVE_ALPN], strict=True)]
    if settings.sni_certificates:
        for contexts in made.values():
            _choose_by_name(certificates, contexts)
    return _Loaded(certificates, {protocol: contexts[0] for protocol, contexts in made.items()})


def _choose_by_name(certificates: list[LoadedCertificate], contexts: Sequence[ssl.SSLContext]) -> None:
    """Let the first context use that of another certificate for clients that ask for one of its names."""

    def choose(handshake: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        for certificate, context in zip(certificates, contexts, strict=True):
            if name and is_named(certificate.names, name):
                handshake.context = context
                return

    contexts[0].sni_callback = choose


def _context(settings: TlsSettings, path: str, key: str, protocol: str) -> HandshakeContext:
    """A context with one certificate."""
    context = HandshakeContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[settings.min_version]
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([protocol])
    _load_pair(context, path, key, settings.key_password_file)
    if settings.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED if settings.client_required else ssl.CERT_OPTIONAL
        # A ticket would let a client in whose CA has been removed since.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        try:
            context.load_verify_locations(cafile=settings.client_ca)
        except (OSError, ValueError) as error:
            raise _unusable("tls_client_ca", settings.client_ca, error, "a PEM file with certificates") from error
    return context


def _load_pair(context: ssl.SSLContext, path: str, key: str, password_file: str) -> None:
    def password() -> bytes:
        if not password_file:
            raise InvalidArgument(f"the private key {key or path} is encrypted: give tls_key_password_file")
        try:
            with open(password_file, "rb") as file:
                return file.read().rstrip(b"\r\n")
        except OSError as error:
            raise _unusable("tls_key_password_file", password_file, error, "a file with the password") from error

    for setting, named in (("tls_certificate", path), ("tls_key", key)):
        try:
            with open(named or path, "rb"):  # an error of OpenSSL does not tell which file it is about
                pass
        except OSError as error:
            raise _unusable(setting, named, error, "a PEM file") from error
    try:
        context.load_cert_chain(path, key or None, password)
    except (ssl.SSLError, ValueError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise InvalidArgument(f"tls_key: {key or path} is not the private key of the certificate {path}") from error
        wanted = "a PEM file with a certificate, and its private key" + (f" in {key}" if key else "")
        raise _unusable("tls_certificate", path, error, wanted) from error


def _unusable(setting: str, path: str, error: Exception, wanted: str) -> InvalidArgument:
    reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
    return InvalidArgument(f"{setting}: {path} cannot be used ({reason}); it must be {wanted}")


def _inspected(path: str, context: ssl.SSLContext) -> LoadedCertificate:
    """Read a certificate by a handshake in memory, which also shows that clients can use it."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    client.load_verify_locations(cafile=path)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trying = client.wrap_bio(to_client, to_server)
    tried = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (trying, tried, trying):  # that is all of it, as far as the client is concerned
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
        decoded: Mapping[str, Any] | None = trying.getpeercert()
    except (ssl.SSLError, ValueError) as error:
        raise _unusable("tls_certificate", path, error, "a certificate for TLS servers") from error
    if not decoded:
        raise InvalidArgument(f"tls_certificate: {path} cannot be used; it must be a certificate for TLS servers")
    not_before_s, not_after_s = (ssl.cert_time_to_seconds(decoded[name]) for name in ("notBefore", "notAfter"))
    return LoadedCertificate(path, certificate_names(decoded), not_before_s, not_after_s)
