"""The files and names that a connection with TLS uses; from arguments, the address or the environment."""

import os
from typing import NamedTuple

from headrace.client.connection.environment import CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE
from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument

GivenPath = str | os.PathLike[str] | None


class TlsOptions(NamedTuple):
    """Options of TLS. Paths are no secrets, the files are: none of their content is kept here."""

    ca: str = ""
    """Path of the CAs to trust: a PEM file, or a directory as OpenSSL has them; empty for those of the system."""
    certificate: str = ""
    """Path of the PEM file with this client's certificate; empty for none."""
    key: str = ""
    """Path of the PEM file with its private key; empty if that is in the file of the certificate."""
    server_name: str = ""
    """The name that the broker's certificate must have; empty for the host of the address."""

    def given(self) -> dict[str, str]:
        """Those that are set, by name."""
        return {name: text for name, text in self._asdict().items() if text}

    def over(self, other: "TlsOptions") -> "TlsOptions":
        """These options, and the other's where these have none; a certificate and its key are taken together."""
        pair = self if self.certificate else other
        return TlsOptions(
            self.ca or other.ca, pair.certificate, self.key or pair.key, self.server_name or other.server_name
        )


def tls_options(
    ca: GivenPath = None, certificate: GivenPath = None, key: GivenPath = None, server_name: str | None = None
) -> TlsOptions:
    """Check the arguments of a program.

    >>> tls_options(ca="ca.pem").given()
    {'ca': 'ca.pem'}
    """
    if not isinstance(server_name, str | None):
        raise InvalidArgument(f"server_name is a text, not {shown(server_name)}")
    if key and not certificate:
        raise InvalidArgument("key is that of a certificate: give certificate, too")
    return TlsOptions(_checked("ca", ca), _checked("certificate", certificate), _checked("key", key), server_name or "")


def tls_options_of_environment() -> TlsOptions:
    """What the environment says: $HEADRACE_CA, $HEADRACE_CERTIFICATE and $HEADRACE_KEY."""
    return TlsOptions(*(os.environ.get(name, "") for name in (CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE)))


def _checked(name: str, path: GivenPath) -> str:
    if path is None:
        return ""
    text: object = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidArgument(f"{name} is the path of a file, not {shown(path)}")
    return text
