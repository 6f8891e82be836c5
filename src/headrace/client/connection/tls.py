"""TLS of a client: what it demands of the broker. Loaded for the first address with TLS, as OpenSSL takes its time."""

import ssl

from headrace.client.connection.addresses import Address
from headrace.model.errors import InvalidArgument

_ALPN = {False: "headrace/1", True: "http/1.1"}
"""By whether the connection begins with HTTP."""


def client_context(address: Address) -> ssl.SSLContext:
    """The context of a connection, with the files as they are now; verification is always on."""
    options = address.tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([_ALPN[address.upgrades]])
    if options.ca:
        try:
            context.load_verify_locations(options.ca)
        except IsADirectoryError:
            context.load_verify_locations(capath=options.ca)
        except (OSError, ValueError) as error:
            raise _unusable("ca", options.ca, error, "a PEM file with the certificates of CAs") from error
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if options.certificate:
        _load_certificate(context, options.certificate, options.key)
    return context


def server_name(address: Address) -> str:
    """The name or address that the broker's certificate must have."""
    return address.tls.server_name or address.host.partition("%")[0]


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    def no_password() -> str:
        raise InvalidArgument(f"the private key {key or certificate} is encrypted; give one without a password")

    for name, path in (("certificate", certificate), ("key", key or certificate)):
        try:
            with open(path, "rb"):  # an error of OpenSSL does not tell which file it is about
                pass
        except OSError as error:
            raise _unusable(name, path, error, "a PEM file") from error
    try:
        context.load_cert_chain(certificate, key or None, no_password)
    except (ssl.SSLError, ValueError) as error:
        wanted = f"a PEM file with a certificate, and its private key in {key or 'the same file'}"
        raise _unusable("certificate", certificate, error, wanted) from error


def _unusable(name: str, path: str, error: Exception, wanted: str) -> InvalidArgument:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return InvalidArgument(f"{name}: {path} cannot be used ({reason}); it must be {wanted}")
