"""A certificate authority for development: makes a CA, and certificates of servers and clients signed by it."""

import contextlib
import importlib
import ipaddress
import os
import socket
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from headrace.model.errors import InvalidArgument
from headrace.security.certificates import IDENTITY_URI

CA_CERTIFICATE = "ca.pem"
CA_KEY = "ca-key.pem"
SERVER_CERTIFICATE = "server.pem"
SERVER_KEY = "server-key.pem"
_CA_DAYS = 3650
_DAYS = 397
"""How long a certificate is valid: browsers refuse those of servers that are valid for longer."""
_BACKDATED = timedelta(minutes=5)
"""Certificates are valid from a moment ago, for clients whose clock is a little late."""
_NAME_CHARS_MAX = 64


class CertificateFiles(NamedTuple):
    """Where a certificate and its private key are."""

    certificate: str
    key: str
    ca: str
    """The CA that has signed it."""


class DevelopmentCa:
    """A CA in a directory. Whoever can read its key can make certificates that its clients accept: keep it private."""

    def __init__(self, directory: str) -> None:
        """Open the CA in a directory, and make it if there is none; files are for their owner alone."""
        self.directory = os.path.abspath(directory)
        self._x509 = _library("x509")
        self._serialization = _library("hazmat.primitives.serialization")
        self._ec = _library("hazmat.primitives.asymmetric.ec")
        self._hashes = _library("hazmat.primitives.hashes")
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self.certificate = os.path.join(self.directory, CA_CERTIFICATE)
        key_path = os.path.join(self.directory, CA_KEY)
        self.is_new = not os.path.exists(key_path)
        """Whether it was made just now."""
        if self.is_new:
            self._key = self._ec.generate_private_key(self._ec.SECP256R1())
            self._signer = self._sign_ca()
            _write(self.certificate, self._pem(self._signer))
            _write(key_path, self._key_pem(self._key))  # last: with it, the CA is complete
            return
        try:
            with open(key_path, "rb") as key_file, open(self.certificate, "rb") as certificate_file:
                self._key = self._serialization.load_pem_private_key(key_file.read(), None)
                self._signer = self._x509.load_pem_x509_certificate(certificate_file.read())
        except (OSError, ValueError, TypeError) as error:
            raise InvalidArgument(
                f"{self.directory} has no development CA that can be used ({error}); remove {CA_KEY} and "
                f"{CA_CERTIFICATE} there to make another, which clients have to be given anew"
            ) from error

    def make_server(
        self,
        names: Sequence[str] = (),
        *,
        not_before: datetime | None = None,
        days: float = _DAYS,
        files: tuple[str, str] = (SERVER_CERTIFICATE, SERVER_KEY),
    ) -> CertificateFiles:
        """Make the certificate of a server for these names and addresses; without any, for those of this machine."""
        checked = [_checked_name(name) for name in names or own_names()]
        alternatives = [self._general_name(name) for name in dict.fromkeys(checked)]
        usage = self._x509.oid.ExtendedKeyUsageOID.SERVER_AUTH
        return self._make(checked[0], alternatives, usage, not_before, days, files)

    def make_client(
        self,
        name: str,
        *,
        not_before: datetime | None = None,
        days: float = _DAYS,
        files: tuple[str, str] | None = None,
    ) -> CertificateFiles:
        """Make the certificate of a client, whose identity has this name."""
        if not name or not name.isprintable() or len(name) > _NAME_CHARS_MAX or "/" in name:
            raise InvalidArgument(f"a client's name has 1 to {_NAME_CHARS_MAX} printable characters and no /: {name!r}")
        uris = [IDENTITY_URI + name] if name.isascii() and " " not in name else []
        alternatives = [self._x509.UniformResourceIdentifier(uri) for uri in uris]
        usage = self._x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH
        chosen = files or (f"client-{name}.pem", f"client-{name}-key.pem")
        return self._make(name, alternatives, usage, not_before, days, chosen)

    def _make(
        self,
        name: str,
        alternatives: Sequence[Any],
        usage: Any,
        not_before: datetime | None,
        days: float,
        files: tuple[str, str],
    ) -> CertificateFiles:
        x509 = self._x509
        key = self._ec.generate_private_key(self._ec.SECP256R1())
        builder = self._builder(name, self._signer.subject, key, not_before, days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        builder = builder.add_extension(self._key_usage(digital_signature=True), critical=True)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        certificate = builder.sign(self._key, self._hashes.SHA256())
        path, key_path = (os.path.join(self.directory, file) for file in files)
        _write(key_path, self._key_pem(key))
        _write(path, self._pem(certificate))
        return CertificateFiles(path, key_path, self.certificate)

    def _sign_ca(self) -> Any:
        x509 = self._x509
        name = f"Headrace development CA of {socket.gethostname()}"[:_NAME_CHARS_MAX]
        builder = self._builder(name, None, self._key, None, _CA_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(self._key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        return builder.sign(self._key, self._hashes.SHA256())

    def _builder(self, name: str, issuer: Any, key: Any, not_before: datetime | None, days: float) -> Any:
        x509 = self._x509
        subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name[:_NAME_CHARS_MAX])])
        start = not_before or datetime.now(UTC) - _BACKDATED
        builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer or subject)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(start).not_valid_after(start + timedelta(days=days))
        return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)

    def _key_usage(self, **used: bool) -> Any:
        every = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
        every += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]
        return self._x509.KeyUsage(**dict.fromkeys(every, False) | used)

    def _general_name(self, name: str) -> Any:
        with contextlib.suppress(ValueError):
            return self._x509.IPAddress(ipaddress.ip_address(name))
        return self._x509.DNSName(name)

    def _pem(self, certificate: Any) -> bytes:
        encoded: bytes = certificate.public_bytes(self._serialization.Encoding.PEM)
        return encoded

    def _key_pem(self, key: Any) -> bytes:
        form = self._serialization
        encoded: bytes = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        return encoded


def own_names(names: Iterable[str] = ()) -> list[str]:
    """The names and addresses by which this machine is reached from itself, its own name, and these."""
    own = socket.gethostname()
    return list(dict.fromkeys(["localhost", "127.0.0.1", "::1", *([own] if _is_host(own) else []), *names]))


def _checked_name(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        if not _is_host(name.removeprefix("*.")):
            raise InvalidArgument(f"{name!r} is neither an address nor a name of a host") from None
    return name.lower()


def _is_host(name: str) -> bool:
    labels = name.split(".")
    return name.isascii() and all(label and label.replace("-", "").replace("_", "").isalnum() for label in labels)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(f"cryptography.{name}")
    except ImportError as error:
        raise InvalidArgument(
            "making certificates needs the package cryptography: pip install 'headrace[security]'"
        ) from error


def _write(path: str, content: bytes) -> None:
    """Replace a file as a whole; it is its owner's alone from the start."""
    beside = f"{path}.{os.getpid()}"
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise
