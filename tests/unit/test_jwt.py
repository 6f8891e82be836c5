"""JWTs: what is accepted, and every known attack made by hand."""

import asyncio
import base64
import hmac
import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.pending_answer import PendingAnswer
from headrace.gateways.authentication import Peer
from headrace.model.errors import Busy, HeadraceError, InvalidArgument, NotAuthenticated, TokenExpired
from headrace.model.identity import Identity
from headrace.security.jwt_keys import parse_jwks
from headrace.security.jwt_verifier import LIFETIME_S_MAX, JwtRules, UnknownKey, verify_jwt
from headrace.server.jwt_authentication import FileKeys, JwtAuthenticator, UrlKeys
from headrace.server.settings import ServerSettings

pytest.importorskip("joserfc", reason="needs the extra `security`")
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa, utils

NOW_S = 1_800_000_000
RULES = JwtRules("https://issuer.example.org", "headrace")
PEER = Peer("native", "192.0.2.1:1")
CLAIMS: dict[str, Any] = {"iss": RULES.issuer, "aud": RULES.audience, "sub": "ada", "exp": NOW_S + 600, "iat": NOW_S}
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def number(value: int) -> str:
    return encoded(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def rsa_jwk(key: rsa.RSAPrivateKey = RSA_KEY, **more: str) -> dict[str, str]:
    public = key.public_key().public_numbers()
    return {"kty": "RSA", "n": number(public.n), "e": number(public.e), **more}


EC_JWK = {
    "kty": "EC",
    "crv": "P-256",
    "x": encoded(EC_KEY.public_key().public_numbers().x.to_bytes(32, "big")),
    "y": encoded(EC_KEY.public_key().public_numbers().y.to_bytes(32, "big")),
    "kid": "ec",
}
ED_JWK = {"kty": "OKP", "crv": "Ed25519", "x": encoded(ED_KEY.public_key().public_bytes_raw()), "kid": "ed"}
JWKS = json.dumps({"keys": [rsa_jwk(kid="rsa"), EC_JWK, ED_JWK]}).encode()
KEYS = parse_jwks(JWKS)


def sign(algorithm: str, content: bytes, rsa_key: rsa.RSAPrivateKey = RSA_KEY) -> bytes:
    match algorithm:
        case "RS256":
            return rsa_key.sign(content, padding.PKCS1v15(), hashes.SHA256())
        case "ES256":
            first, second = utils.decode_dss_signature(EC_KEY.sign(content, ec.ECDSA(hashes.SHA256())))
            return first.to_bytes(32, "big") + second.to_bytes(32, "big")
        case "EdDSA" | "Ed25519":
            return ED_KEY.sign(content)
    raise AssertionError(algorithm)


def token(
    claims: dict[str, Any] | None = None,
    *,
    alg: str = "RS256",
    kid: Any = "rsa",
    signature: bytes | None = None,
    key: rsa.RSAPrivateKey = RSA_KEY,
    header: dict[str, Any] | None = None,
) -> bytes:
    """A token, right unless told otherwise; claims of None are left out."""
    head = {"typ": "JWT", "alg": alg, **({} if kid is None else {"kid": kid}), **(header or {})}
    told = {name: value for name, value in {**CLAIMS, **(claims or {})}.items() if value is not None}
    content = f"{encoded(json.dumps(head).encode())}.{encoded(json.dumps(told).encode())}"
    signed = sign(alg, content.encode(), key) if signature is None else signature
    return f"{content}.{encoded(signed)}".encode()


def verified(given: bytes, rules: JwtRules = RULES, now_s: float = NOW_S) -> Identity:
    return verify_jwt(given, KEYS, rules, round(now_s * 1e6))


@pytest.mark.parametrize(("alg", "kid"), [("RS256", "rsa"), ("ES256", "ec"), ("EdDSA", "ed"), ("Ed25519", "ed")])
def test_each_algorithm_is_accepted_with_a_key_of_its_kind(alg: str, kid: str) -> None:
    identity = verified(token({"groups": ["desk"]}, alg=alg, kid=kid))
    assert (identity.name, identity.tenant, identity.claims["groups"]) == ("ada", "", ["desk"])
    assert identity.expires_us == (NOW_S + 630) * 1_000_000


def test_a_token_without_a_kid_is_accepted_if_one_key_fits() -> None:
    assert verified(token(kid=None)).name == "ada"
    assert verified(token({"aud": ["other", "headrace"]})).name == "ada"


def public_pem() -> bytes:
    return RSA_KEY.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def hmac_token(secret: bytes, alg: str = "HS256", kid: str = "rsa") -> bytes:
    content = token(alg="RS256", kid=kid, header={"alg": alg}, signature=b"x").rpartition(b".")[0]
    return content + b"." + encoded(hmac.digest(secret, content, sha256)).encode()


def without_signature(alg: str) -> bytes:
    return token(signature=b"", header={"alg": alg})


OTHER_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
ATTACKS: dict[str, bytes] = {
    "alg none": without_signature("none"),
    "alg None": without_signature("None"),
    "alg none with a signature": token(signature=b"x", header={"alg": "none"}),
    "alg is no text": token(header={"alg": ["RS256"]}),
    "HMAC with the public key as PEM": hmac_token(public_pem()),
    "HMAC with the public key as JWK": hmac_token(json.dumps(rsa_jwk()).encode()),
    "HMAC with an empty key": hmac_token(b""),
    "an algorithm of the same kind that is not offered": token(header={"alg": "RS512"}, signature=b"x"),
    "PS256": token(header={"alg": "PS256"}, signature=b"x"),
    "an RSA signature for the EC key": token(kid="ec"),
    "an EdDSA token that names the RSA key": token(alg="EdDSA", kid="rsa"),
    "signed by another key": token(key=OTHER_KEY),
    "the key in the header": token(key=OTHER_KEY, header={"jwk": rsa_jwk(OTHER_KEY)}),
    "a URL of keys in the header": token(header={"jku": "https://evil.example/jwks"}),
    "a URL of a certificate in the header": token(header={"x5u": "https://evil.example/cert"}),
    "a certificate in the header": token(header={"x5c": ["MIIB"]}),
    "crit": token(header={"crit": ["exp"]}),
    "b64": token(header={"b64": False}),
    "kid as a path": token(kid="../../../../dev/null"),
    "kid as SQL": token(kid="rsa' UNION SELECT 'x"),
    "kid as a URL": token(kid="https://evil.example/key"),
    "kid with a null": token(kid="rsa\0"),
    "kid is no text": token(kid={"rsa": 1}),
    "kid is long": token(kid="k" * 1000),
    "another type": token(header={"typ": "logout+jwt"}),
    "another issuer": token({"iss": "https://evil.example"}),
    "no issuer": token({"iss": None}),
    "another audience": token({"aud": "billing"}),
    "no audience": token({"aud": None}),
    "an audience that begins alike": token({"aud": "headrace-test"}),
    "no end": token({"exp": None}),
    "an end that is no number": token({"exp": "soon"}),
    "an end that is true": token({"exp": True}),
    "an endless end": token({"exp": 1e300}),
    "not valid yet": token({"nbf": NOW_S + 100}),
    "issued in the future": token({"iat": NOW_S + 100}),
    "valid for too long": token({"exp": NOW_S + LIFETIME_S_MAX + 100}),
    "valid for too long, without saying since when": token({"exp": NOW_S + LIFETIME_S_MAX + 100, "iat": None}),
    "no name": token({"sub": None}),
    "an empty name": token({"sub": ""}),
    "a name that is no text": token({"sub": 7}),
    "the name of the local user": token({"sub": "local"}),
    "the name of nobody": token({"sub": "anonymous"}),
    "a name with a wildcard": token({"sub": "*"}),
    "a name with a line": token({"sub": "ada\nadmin"}),
    "a token that is too large": token({"padding": "x" * 20_000}),
    "four parts": token() + b".AAAA",
    "two parts": token().rpartition(b".")[0],
    "not base64": b"!!.!!.!!",
    "header is a list": encoded(b"[]").encode() + b"." + token().split(b".", 1)[1],
    "deep JSON": encoded(b"[" * 9000).encode() + b"." + token().split(b".", 1)[1],
    "nothing": b"",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_and_the_error_has_nothing_of_the_token(attack: str) -> None:
    with pytest.raises((NotAuthenticated, UnknownKey)) as refused:
        verified(ATTACKS[attack])
    for part in ATTACKS[attack].decode().split("."):
        assert len(part) < 20 or part not in str(refused.value)
    assert "evil" not in str(refused.value)


def test_changed_claims_and_signatures_are_refused() -> None:
    head, claims, signature = token().split(b".")
    other = token({"sub": "admin"}).split(b".")[1]
    changed = bytearray(base64.urlsafe_b64decode(signature + b"=="))
    changed[10] ^= 1
    for parts in ((head, other, signature), (head, claims, encoded(bytes(changed)).encode())):
        with pytest.raises(NotAuthenticated):
            verified(b".".join(parts))


def test_clocks_may_differ_a_little_and_expired_tokens_are_told() -> None:
    given = token({"exp": NOW_S + 60, "nbf": NOW_S, "iat": NOW_S})
    assert verified(given, now_s=NOW_S - 29).name == "ada"
    assert verified(given, now_s=NOW_S + 89).name == "ada"
    with pytest.raises(TokenExpired):
        verified(given, now_s=NOW_S + 90)
    with pytest.raises(NotAuthenticated):
        verified(given, now_s=NOW_S - 31)


def test_names_and_tenants_come_from_the_claims_that_the_operator_names() -> None:
    rules = RULES._replace(name_claim="email", tenant_claim="org")
    identity = verified(token({"email": "ada@example.org", "org": "acme"}), rules)
    assert (identity.name, identity.tenant) == ("ada@example.org", "acme")
    for claims in ({"email": "ada@example.org"}, {"email": "a@b.c", "org": "../x"}, {"email": "a@b.c", "org": "a/b"}):
        with pytest.raises(NotAuthenticated):
            verified(token(claims), rules)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"keys": {}}',
        b'{"keys": []}',
        json.dumps({"keys": [{"kty": "oct", "k": "AAAA", "kid": "rsa"}]}).encode(),
        json.dumps({"keys": [rsa_jwk(use="enc")]}).encode(),
        json.dumps({"keys": [rsa_jwk(alg="RS512")]}).encode(),
        json.dumps({"keys": [rsa_jwk(kid="a"), rsa_jwk(kid="a")]}).encode(),
        json.dumps({"keys": [{**rsa_jwk(), "d": "AQAB"}]}).encode(),
        json.dumps({"keys": [{"kty": "RSA", "n": "!!", "e": "AQAB"}]}).encode(),
        json.dumps({"keys": [rsa_jwk(rsa.generate_private_key(public_exponent=65537, key_size=1024))]}).encode(),
        b"x" * 100_000,
    ],
)
def test_a_wrong_jwks_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parse_jwks(content)


def test_a_file_is_read_again_when_it_changes_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    path, now_us = tmp_path / "jwks.json", NOW_S * 1_000_000
    path.write_bytes(json.dumps({"keys": [EC_JWK]}).encode())
    authenticate = JwtAuthenticator(RULES, FileKeys(str(path)), lambda: now_us)
    with pytest.raises(NotAuthenticated):
        authenticate(token(), PEER)
    path.write_bytes(JWKS)
    now_us += 2_000_000
    assert authenticate(token(), PEER) == verified(token())
    path.write_bytes(b"half a fi")
    now_us += 2_000_000
    assert authenticate(token(), PEER) == verified(token())
    os.unlink(path)
    now_us += 2_000_000
    assert authenticate(token(), PEER) == verified(token())
    with pytest.raises(InvalidArgument):
        FileKeys(str(path))


def test_keys_of_a_url_are_fetched_at_a_bounded_rate_and_the_last_good_ones_stay() -> None:
    async def story() -> None:
        answers: list[bytes | HeadraceError] = [json.dumps({"keys": [EC_JWK]}).encode()]
        fetched = 0
        now_us = NOW_S * 1_000_000

        async def fetch() -> bytes:
            nonlocal fetched
            fetched += 1
            await asyncio.sleep(0)
            if isinstance(answers[-1], HeadraceError):
                raise answers[-1]
            return answers[-1]

        authenticate = JwtAuthenticator(RULES, UrlKeys("https://issuer.example.org/jwks", fetch), lambda: now_us)

        async def asked(given: bytes) -> Identity:
            found = authenticate(given, PEER)
            return await found if isinstance(found, PendingAnswer) else found

        answers.append(InvalidArgument("the issuer is down"))
        with pytest.raises(Busy):  # which a client repeats; `not_authenticated` would be the end of it
            await asked(token())
        answers.pop()
        fetched, now_us = 0, now_us + 10_000_000
        together = await asyncio.gather(*(asked(token(alg="ES256", kid="ec")) for _ in range(5)))
        assert ({one.name for one in together}, fetched) == ({"ada"}, 1)
        for _ in range(100):  # names of keys that do not exist do not make the broker fetch all the time
            with pytest.raises(NotAuthenticated):
                await asked(token(kid="unknown"))
        assert fetched == 1
        answers.append(JWKS)  # the issuer has a new key
        now_us += 10_000_000
        assert (await asked(token())).name == "ada"
        assert fetched == 2
        answers.append(InvalidArgument("the issuer is down"))
        now_us += 400_000_000
        later = token({"exp": NOW_S + 1000})
        assert (await asked(later)).name == "ada"
        await asyncio.sleep(0.01)
        assert fetched == 3
        assert (await asked(later)).name == "ada"

    asyncio.run(story())


@pytest.mark.parametrize(
    "given",
    [
        {"jwt_issuer": "x"},
        {"jwt_issuer": "x", "jwt_audience": "y"},
        {"jwt_issuer": "x", "jwt_audience": "y", "jwt_keys": "http://example.org/jwks"},
        {"jwt_issuer": "x", "jwt_audience": "y", "jwt_keys": "k", "jwt_name_claim": ""},
        {"jwt_issuer": "x", "jwt_audience": "y", "jwt_keys": "k", "authenticator": "anonymous"},
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        ServerSettings(data=":memory:", **given)  # type: ignore[arg-type]
