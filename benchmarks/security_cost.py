"""What authorisation and TLS cost: the same broker with and without, beside Redis and NATS with TLS."""

import os
from collections.abc import Mapping
from typing import ClassVar

from benchmarks.broker import forgiven
from benchmarks.broker_nats import Nats, NatsNode
from benchmarks.broker_redis import Redis, RedisNode
from headrace.bench.broker_workloads import Headrace, HeadraceNode
from headrace.bench.brokers import CLIENTS, consuming, publishing, publishing_single
from headrace.bench.measure import Benchmark, rate
from headrace.bench.payload import Payload
from headrace.client._sync.connecting import connect
from headrace.security.development_ca import DevelopmentCa

_SINGLES_MAX = 60_000


class SecuredNode(HeadraceNode):
    """A broker with security on; its clients authenticate with a token."""

    _token_file = ""

    @property
    def address(self) -> str:
        """The address for clients, with the file of their token once there is one."""
        plain = super().address
        return f"{plain}?token_file={self._token_file}" if self._token_file else plain

    def _start(self, place: str, *, synced: bool) -> None:
        self._token_file = ""
        super()._start(place, synced=synced)
        with connect(self.address) as bus:
            bus.auth.bind("developer", "bench")
            token = bus.auth.create_token("bench").token
            bus.auth.bind("administrator", "admin")
            admin = bus.auth.create_token("admin").token
        with connect(self.address, token=admin) as bus:
            bus.auth.enable()
        path = os.path.join(place, "token")
        with open(path, "w", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(token)
        self._token_file = path


class TlsNode(HeadraceNode):
    """A broker that speaks TLS."""

    _ca = ""

    @property
    def address(self) -> str:
        """The address for clients, with the CA that they trust."""
        return super().address.replace("headrace:", "headraces:") + f"?ca={self._ca}"

    def _options(self, place: str) -> list[str]:
        files = DevelopmentCa(place).make_server()
        self._ca = files.ca
        return ["--tls-certificate", files.certificate, "--tls-key", files.key]


class OpenHeadrace(Headrace):
    """The broker without security and without TLS."""

    name = "headrace_plain"


class RedisTls(Redis):
    """Redis with TLS."""

    name = "redis_tls"
    words: ClassVar[Mapping[bool, str]] = {synced: f"{words}; TLS" for synced, words in Redis.words.items()}

    def __init__(self) -> None:
        super().__init__(RedisNode(tls=True))


class NatsTls(Nats):
    """NATS with TLS."""

    name = "nats_tls"
    words: ClassVar[Mapping[bool, str]] = {synced: f"{words}; TLS" for synced, words in Nats.words.items()}

    def __init__(self) -> None:
        super().__init__(NatsNode(tls=True))


def cost_benchmarks(clients: int = CLIENTS) -> list[Benchmark]:
    """What authorisation and TLS cost."""
    payload = Payload()
    singles = {"size": payload.size, "batch": 1, "clients": clients}
    secured, plain = (lambda: Headrace(SecuredNode())), OpenHeadrace
    peers = (RedisTls, NatsTls)
    tls_publish = [publishing(each, payload, synced=True) for each in (Headrace(TlsNode()), plain())]
    tls_publish += [forgiven(publishing(peer(), payload, synced=True)) for peer in peers]
    tls_consume = [consuming(each, payload) for each in (Headrace(TlsNode()), plain())]
    tls_consume += [forgiven(consuming(peer(), payload)) for peer in peers]
    return [
        Benchmark(
            {"authorised_publish": rate()},
            [publishing(each, payload, synced=True) for each in (secured(), plain())],
            payload.params,
            None,
            payload.count_max,
        ),
        Benchmark(
            {"authorised_publish_single": rate()},
            [publishing_single(each, payload, clients) for each in (secured(), plain())],
            singles,
            None,
            _SINGLES_MAX,
        ),
        Benchmark({"tls_publish": rate()}, tls_publish, payload.params, None, payload.count_max),
        Benchmark({"tls_consume": rate()}, tls_consume, payload.params, None, payload.count_max),
    ]
