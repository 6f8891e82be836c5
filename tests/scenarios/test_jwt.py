"""JWTs on a real server: over both protocols, with roles by claims, until they expire."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.http_client import HttpClient, also_http, native_url_of, url_of

import headrace
from headrace.errors import Forbidden, NotAuthenticated, TokenExpired
from headrace.server import EmbeddedServer

jwt = pytest.importorskip("joserfc.jwt", reason="needs the extra `security`")
jwk = pytest.importorskip("joserfc.jwk", reason="needs the extra `security`")

ISSUER = "https://issuer.example.org"


class Issuer:
    """Signs tokens, and publishes its key in a file."""

    def __init__(self, path: Path) -> None:
        self._key = jwk.ECKey.generate_key("P-256", parameters={"kid": "1"})
        path.write_text(json.dumps({"keys": [self._key.as_dict(private=False)]}))

    def token(self, name: str, seconds: float = 600, **claims: object) -> str:
        """A token that ends after some seconds."""
        now_s = time.time()
        told = {"iss": ISSUER, "aud": "headrace", "sub": name, "iat": now_s - 100, "exp": now_s + seconds, **claims}
        signed: str = jwt.encode({"alg": "ES256", "kid": "1"}, told, self._key)
        return signed


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "jwks.json")


@pytest.fixture
def server(tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:  # noqa: ARG001
    for name in ("HEADRACE_TOKEN", "HEADRACE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    settings = {"jwt_issuer": ISSUER, "jwt_audience": "headrace", "jwt_keys": str(tmp_path / "jwks.json")}
    listening = {"host": "127.0.0.1", "port": 0, "unix_socket": f"{tmp_path}/s", **also_http()}
    with closing(EmbeddedServer(":memory:", **settings, **listening)) as server:
        with headrace.connect(f"headrace+unix://{tmp_path}/s") as admin:
            admin.publish("orders", b"first")
            admin.auth.bind("consumer", claims={"groups": "desk-*"})
            admin.auth.enable()
        yield server


def test_roles_are_bound_to_claims_over_every_protocol(server: EmbeddedServer, issuer: Issuer) -> None:
    token = issuer.token("ada", groups=["staff", "desk-1"])
    with headrace.connect(native_url_of(server), token=token) as bus:
        assert bus.auth.who_am_i().roles == ["consumer"]
        with bus.subscribe("orders", start="earliest") as messages:
            assert next(iter(messages)).value == b"first"
        with pytest.raises(Forbidden):
            bus.delete_topic("orders")
    with pytest.raises(Forbidden), headrace.connect(native_url_of(server), token=issuer.token("eve")) as bus:
        bus.info()
    if also_http():
        with closing(HttpClient(url_of(server))) as client:
            bearer = {"authorization": f"Bearer {token}"}
            assert client.ask("GET", "/v1/auth/identity", headers=bearer).json["identity"] == "ada"
            assert client.ask("GET", "/v1/auth/identity", headers={"authorization": f"Bearer {token}x"}).status == 401


def test_a_session_ends_with_its_token(server: EmbeddedServer, issuer: Issuer) -> None:
    token = issuer.token("ada", seconds=-29, groups="desk-1")  # clocks may differ by 30 seconds
    with (
        headrace.connect(native_url_of(server), token=token) as bus,
        bus.subscribe("orders", start="latest", timeout=20) as messages,
        pytest.raises((TokenExpired, NotAuthenticated)),
    ):
        list(messages)
    with pytest.raises(TokenExpired), headrace.connect(native_url_of(server), token=token) as bus:
        bus.info()
