"""Verifies JWTs (RFC 7519, RFC 8725): who the bearer is, by the signature of an issuer that the broker trusts.

The broker decides what counts: only asymmetric algorithms, each with keys of its own kind; only keys that the operator
has named, which a token can choose by `kid` and never bring along. Errors tell nothing of the token.
"""

import base64
import binascii
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.model.errors import InvalidArgument, NotAuthenticated, TokenExpired
from headrace.model.identity import Identity
from headrace.model.topic import checked_tenant
from headrace.security.definitions import checked_identity
from headrace.security.jwt_keys import KID_CHARS_MAX, JwtKey, load_joserfc

JWT_BYTES_MAX = 16 << 10
LEEWAY_S = 30
"""How much the clocks of the issuer and the broker may differ."""
LIFETIME_S_MAX = 86_400
"""Tokens that are valid for longer are refused: nobody can revoke them one by one."""
_COMPACT = re.compile(rb"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")
_ALGORITHMS = frozenset({"RS256", "ES256", "EdDSA", "Ed25519"})
_TYPES = frozenset({"jwt", "at+jwt", "application/jwt", "application/at+jwt"})
_REFUSED_HEADERS = ("jwk", "jku", "x5u", "x5c", "crit", "b64", "zip")
"""Members of a header that would bring or fetch a key, or change what the rest means."""
_TIME_MAX = 1 << 40


class JwtRules(NamedTuple):
    """What a token has to say."""

    issuer: str
    audience: str
    name_claim: str = "sub"
    tenant_claim: str = ""
    """The claim with the tenant that the identity belongs to; empty: none does."""


class UnknownKey(Exception):
    """No key has the id that a token names: the keys may have been replaced meanwhile."""


def verify_jwt(token: bytes, keys: Mapping[str, JwtKey], rules: JwtRules, now_us: int) -> Identity:
    """The identity that a token proves; raises NotAuthenticated, or UnknownKey where newer keys may help."""
    match = _COMPACT.fullmatch(token) if len(token) <= JWT_BYTES_MAX else None
    if match is None:
        raise NotAuthenticated("the token is no JWT and no token of this broker")
    header = _decoded(match.group(1))
    algorithm = _checked_algorithm(header)
    key = _key(header, algorithm, keys)
    _check_signature(token, key, algorithm)
    return _identity(_decoded(match.group(2)), rules, now_us)


def _decoded(segment: bytes) -> dict[str, Any]:
    try:
        content = json.loads(base64.urlsafe_b64decode(segment + b"=" * (-len(segment) % 4)))
    except (ValueError, binascii.Error, RecursionError) as error:
        raise NotAuthenticated("the JWT cannot be decoded") from error
    if not isinstance(content, dict):
        raise NotAuthenticated("the JWT cannot be decoded")
    return content


def _checked_algorithm(header: dict[str, Any]) -> str:
    algorithm = header.get("alg")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise NotAuthenticated("the JWT is not signed with RS256, ES256 or EdDSA")
    for name in _REFUSED_HEADERS:
        if name in header:
            raise NotAuthenticated(f"a JWT with {name} in its header is not accepted")
    kind = header.get("typ", "JWT")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise NotAuthenticated("the token is of another type than JWT")
    return algorithm


def _key(header: dict[str, Any], algorithm: str, keys: Mapping[str, JwtKey]) -> JwtKey:
    """The key that the token names, compared as text with those that are known; or the only one for its algorithm."""
    kid = header.get("kid")
    if kid is None:
        fitting = [key for key in keys.values() if algorithm in key.algorithms]
        if len(fitting) != 1:
            raise UnknownKey("the JWT names no key (kid), and there is not exactly one for its algorithm")
        return fitting[0]
    if not isinstance(kid, str) or len(kid) > KID_CHARS_MAX:
        raise NotAuthenticated("the kid of the JWT is no short text")
    found = keys.get(kid)
    if found is None:
        raise UnknownKey("no key of the issuer has the kid of the JWT")
    if algorithm not in found.algorithms:
        raise NotAuthenticated("the key that the JWT names is for another algorithm")
    return found


def _check_signature(token: bytes, key: JwtKey, algorithm: str) -> None:
    jws = load_joserfc("jws")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # RFC 9864 renames EdDSA; issuers use the old name
            jws.deserialize_compact(token, key.public, algorithms=[algorithm])
    except Exception as error:  # whatever it is, the signature was not verified
        raise NotAuthenticated("the signature of the JWT is wrong") from error


def _identity(claims: dict[str, Any], rules: JwtRules, now_us: int) -> Identity:
    now_s = now_us / 1e6
    expires_s = _time(claims, "exp")
    not_before_s, issued_s = _time(claims, "nbf"), _time(claims, "iat")
    if expires_s is None:
        raise NotAuthenticated("the JWT has no exp: tokens without an end are not accepted")
    if expires_s + LEEWAY_S <= now_s:
        raise TokenExpired("the JWT has expired: get another one from its issuer")
    for begin_s in (not_before_s, issued_s):
        if begin_s is not None and begin_s - LEEWAY_S > now_s:
            raise NotAuthenticated("the JWT is not valid yet; compare the clocks of its issuer and of the broker")
    begin_s = now_s if issued_s is None else issued_s
    if expires_s - begin_s > LIFETIME_S_MAX + LEEWAY_S:
        raise NotAuthenticated(f"the JWT is valid for longer than {LIFETIME_S_MAX // 3600} hours")
    if claims.get("iss") != rules.issuer:
        raise NotAuthenticated("the JWT is of another issuer than jwt_issuer")
    audience = claims.get("aud")
    if rules.audience not in (audience if isinstance(audience, list) else [audience]):
        raise NotAuthenticated("the JWT is for another audience than jwt_audience")
    try:
        name = checked_identity(_text(claims, rules.name_claim))
        tenant = checked_tenant(_text(claims, rules.tenant_claim)) if rules.tenant_claim else ""
    except InvalidArgument as error:
        raise NotAuthenticated("a claim of the JWT cannot name an identity or a tenant") from error
    return Identity(name, tenant, claims=claims, expires_us=round((expires_s + LEEWAY_S) * 1e6))


def _time(claims: dict[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if (
        isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _TIME_MAX
    ):  # NaN is not, either
        raise NotAuthenticated(f"{name} of the JWT is no time")
    return float(value)


def _text(claims: dict[str, Any], name: str) -> str:
    value = claims.get(name)
    if not isinstance(value, str) or not value:
        raise NotAuthenticated(f"the JWT has no claim {name} that is a text")
    return value
