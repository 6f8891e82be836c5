"""The public keys of an issuer of JWTs, as a JWKS (RFC 7517) tells them. Symmetric keys are never taken."""

import importlib
import json
from typing import Any

from headrace.model.errors import InvalidArgument, UnsupportedOperation

JWKS_BYTES_MAX = 64 << 10
_KEYS_MAX = 100
KID_CHARS_MAX = 256
_RSA_BITS = range(2048, 8193)


class JwtKey:
    """A public key, and the only algorithms that it may be used with."""

    def __init__(self, kid: str, algorithms: frozenset[str], public: Any) -> None:
        self.kid = kid
        self.algorithms = algorithms
        self.public = public


def load_joserfc(name: str) -> Any:
    """A module of joserfc, which the extra `security` has."""
    try:
        return importlib.import_module(f"joserfc.{name}")
    except ImportError as error:
        raise UnsupportedOperation(
            "JWTs need the extra `security`: pip install 'headrace[security]', or leave the jwt_ settings out"
        ) from error


def parse_jwks(content: bytes) -> dict[str, JwtKey]:
    """The keys of a JWKS by their ids, without those for other purposes; raises InvalidArgument if there is none."""
    if len(content) > JWKS_BYTES_MAX:
        raise InvalidArgument(f"a JWKS has at most {JWKS_BYTES_MAX} bytes")
    try:
        document = json.loads(content)
        listed = document["keys"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidArgument('a JWKS is a JSON object with a list "keys"') from error
    if not isinstance(listed, list) or len(listed) > _KEYS_MAX:
        raise InvalidArgument(f'"keys" of a JWKS is a list of at most {_KEYS_MAX} keys')
    found: dict[str, JwtKey] = {}
    for each in listed:
        key = _parse_key(each) if isinstance(each, dict) else None
        if key is None:
            continue
        if key.kid in found:
            raise InvalidArgument("a JWKS has two keys with the same kid: each needs one of its own")
        found[key.kid] = key
    if not found:
        raise InvalidArgument("the JWKS has no public key for RS256, ES256 or EdDSA")
    return found


def _parse_key(fields: dict[str, Any]) -> JwtKey | None:
    """A key for signatures; None if it is for something else, or of a kind that is not used here."""
    kid, use = fields.get("kid", ""), fields.get("use", "sig")
    algorithms = _algorithms(fields)
    if not isinstance(kid, str) or len(kid) > KID_CHARS_MAX or use != "sig" or not algorithms:
        return None
    if "d" in fields:
        raise InvalidArgument("the JWKS has a private key: publish only public keys, and replace this one")
    jwk = load_joserfc("jwk")
    try:
        public = jwk.JWKRegistry.import_key({name: value for name, value in fields.items() if name != "key_ops"})
    except Exception as error:  # whatever a library makes of a wrong key
        raise InvalidArgument(f"a key of the JWKS cannot be used: {type(error).__name__}") from error
    if fields["kty"] == "RSA" and public.public_key.key_size not in _RSA_BITS:
        raise InvalidArgument("an RSA key of the JWKS has not 2048 to 8192 bits")
    return JwtKey(kid, algorithms, public)


def _algorithms(fields: dict[str, Any]) -> frozenset[str]:
    match fields.get("kty"), fields.get("crv"):
        case "RSA", _:
            usable = frozenset({"RS256"})
        case "EC", "P-256":
            usable = frozenset({"ES256"})
        case "OKP", "Ed25519":
            usable = frozenset({"EdDSA", "Ed25519"})
        case _:
            return frozenset()
    named = fields.get("alg")
    return usable if named is None or named in usable else frozenset()
