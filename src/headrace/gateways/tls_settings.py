"""The settings of TLS; a module of its own, because reading settings should not have to load OpenSSL."""

import msgspec

from headrace.model.type_info import build_type_info
from headrace.security.certificates import DEFAULT_NAME_RULES

NATIVE_ALPN = "headrace/1"
HTTP_ALPN = "http/1.1"
"""The names of the two protocols in the handshake."""


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of TLS on a server."""

    certificate: str
    """Path of a PEM file with the certificate, and those between it and the CA."""
    key: str = ""
    """Path of a PEM file with the private key; empty if it is in the file of the certificate."""
    key_password_file: str = ""
    sni_certificates: tuple[str, ...] = ()
    """Paths of further PEM files, each with a certificate and its key, for clients that ask for one of its names."""
    client_ca: str = ""
    client_required: bool = False
    client_names: tuple[str, ...] = DEFAULT_NAME_RULES
    min_version: str = "1.2"
    handshake_seconds: float = 10.0

    @property
    def files(self) -> list[str]:
        """All files that are watched."""
        named = [self.certificate, self.key, self.key_password_file, *self.sni_certificates, self.client_ca]
        return [path for path in named if path]


build_type_info(TlsSettings)
