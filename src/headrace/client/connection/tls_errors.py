"""What to tell a user when TLS fails, or a connection cannot be made or breaks. Does not load OpenSSL itself."""

from typing import Any

from headrace.client.connection.addresses import Address, Target, unreachable
from headrace.model.errors import ConnectionFailed, TlsFailed

_UNKNOWN_CA = frozenset({2, 18, 19, 20, 21, 24, 27})
_NOT_YET_VALID, _EXPIRED = 9, 10
_WRONG_NAME = frozenset({62, 63, 64})
_ALERTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "required",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "handshake",
    "TLSV1_ALERT_UNKNOWN_CA": "refused",
    "TLSV1_ALERT_DECRYPT_ERROR": "refused",
    "SSLV3_ALERT_BAD_CERTIFICATE": "refused",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "refused",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "refused",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "refused",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "refused",
    "TLSV1_ALERT_PROTOCOL_VERSION": "version",
    "TLSV1_ALERT_INSUFFICIENT_SECURITY": "version",
    "UNSUPPORTED_PROTOCOL": "version",
    "WRONG_SSL_VERSION": "version",
    "NO_PROTOCOLS_AVAILABLE": "version",
    "WRONG_VERSION_NUMBER": "plain",
    "HTTP_REQUEST": "plain",
    "PACKET_LENGTH_TOO_LONG": "plain",
}
"""What a reason of OpenSSL means."""
_MEANINGS = {
    "required": "the broker demands a client certificate: give certificate and key "
    "($HEADRACE_CERTIFICATE, $HEADRACE_KEY)",
    "handshake": "the broker refuses the handshake; it may demand a client certificate, or ciphers that are not here",
    "refused": "the broker does not accept the client certificate: it must be valid, and signed by a CA of its "
    "tls_client_ca",
    "version": "client and broker have no version of TLS in common; 1.2 is the lowest here",
    "plain": "it speaks no TLS",
}


def connect_failed(target: Target, error: BaseException) -> ConnectionFailed:
    """Make an error of a connection that could not be made."""
    if isinstance(target, Address) and _is_tls(error):
        hint = ""
        if _ALERTS.get(getattr(error, "reason", "")) == "plain":
            hint = f": connect to {target.scheme.removesuffix('s')}:// instead of {target.scheme}://"
        return TlsFailed(f"TLS failed with {target.place}: {tls_reason(error)}{hint}")
    told: BaseException | str = error
    if isinstance(target, Address) and target.has_tls and (_is_end(error) or isinstance(error, ConnectionResetError)):
        told = "the connection was closed during the handshake; the broker's log may tell why"
    return ConnectionFailed(unreachable(target, told))


def connection_broken(error: BaseException | str) -> ConnectionFailed:
    """Make an error of a connection that broke. With TLS 1.3 a broker refuses a client after its handshake."""
    if _is_tls(error):
        return TlsFailed(f"the connection to the broker broke: {tls_reason(error)}")
    return ConnectionFailed(f"the connection to the broker broke: {error}")


def tls_reason(error: Any) -> str:
    """What an error of OpenSSL means, and what to do."""
    if hasattr(error, "verify_code"):
        return _certificate_reason(error.verify_code, error.verify_message.rstrip("."))
    meaning = _MEANINGS.get(_ALERTS.get(error.reason or "", ""))
    return f"{meaning} ({error.reason})" if meaning else str(error)


def _certificate_reason(code: int, told: str) -> str:
    if code in _UNKNOWN_CA:
        return f"no CA trusted here has signed the broker's certificate ({told}); give its CA as ca ($HEADRACE_CA)"
    if code == _EXPIRED:
        return "the broker's certificate, or its CA's, has expired; replace it, or set the clock of this machine"
    if code == _NOT_YET_VALID:
        return "the broker's certificate is not valid yet; set the clock of this machine, or that of the CA"
    if code in _WRONG_NAME:
        return f"{told}; connect by a name of the certificate, or give the name that it must have as server_name"
    return f"the broker's certificate is refused: {told}"


def _is_tls(error: object) -> bool:
    """Whether it is an error of TLS, and not only the end of a connection."""
    return type(error).__module__ == "ssl" and not _is_end(error)


def _is_end(error: object) -> bool:
    return type(error).__name__ in ("SSLEOFError", "SSLZeroReturnError")
