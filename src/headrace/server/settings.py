"""The settings of a server, and their checks."""

import os
import re
from collections.abc import Container
from typing import Any, ClassVar

import msgspec

from headrace.broker.settings import BrokerSettings
from headrace.gateways.addresses import TLS_SCHEMES, parse_listen_address
from headrace.gateways.tls_settings import TlsSettings
from headrace.model.errors import InvalidArgument
from headrace.model.topic import topic_settings
from headrace.model.type_info import build_type_info
from headrace.security.certificates import DEFAULT_NAME_RULES, NAME_RULES
from headrace.server.cluster_settings import check_cluster
from headrace.wire.native import DEFAULT_PORT

MEMORY = ":memory:"
"""Instead of a directory: keep everything in memory."""
SOCKET_NAME = "headrace.sock"

_BROKER_DEFAULTS = BrokerSettings()
_NEED_CERTIFICATE = ("tls_key", "tls_key_password_file", "tls_sni_certificates", "tls_client_ca", "tls_client_required")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a server."""

    must_listen: ClassVar[bool] = True
    data: str
    """The directory of all data, made if there is none; or `:memory:`, where nothing outlives the server."""
    host: str = "127.0.0.1"
    """The host to listen on with TCP: an address or a name of this machine; empty for none."""
    port: int = DEFAULT_PORT
    """The TCP port; 0 for any that is free."""
    unix_socket: str | None = None
    """Path of a Unix socket to listen on; by default headrace.sock in the data directory, empty for none."""
    listen: list[str] = []
    """Addresses to listen on, as URLs: headrace://HOST:PORT, headraces://HOST:PORT with TLS, http:// and https://,
    unix:///PATH, or the scheme of a plug-in's gateway.
    Given alone it replaces the defaults of host, port and unix_socket, which are the short form for the first."""
    http_address: str = ""
    """HOST:PORT on which HTTP is served; empty for none. `headrace serve` takes 127.0.0.1:7391 if the extra `http` is
    installed and no other address is given."""
    http_hosts: list[str] = []
    """Names by which clients may call the broker over HTTP, besides localhost and addresses in numbers; `*` for any."""
    http_origins: list[str] = []
    """Origins of web pages that may use the broker over HTTP, such as https://app.example.org; `*` for any."""
    http_webhook_origins: list[str] = []
    """Hosts that are permitted to deliver CloudEvents when they ask, such as events.example.org; `*` for any."""
    http_body_bytes_max: int = 32 << 20
    """The largest body of a request of HTTP, also after it is unpacked."""
    http_request_seconds: float = 30.0
    """How long the head of a request of HTTP may take to arrive, and then its body."""
    http_idle_seconds: float = 60.0
    """How long a connection of HTTP may wait for its next request."""
    http_wait_seconds_max: float = 60.0
    """The longest time that a request of HTTP may wait for messages."""
    http_stream_seconds: float = 0.0
    """How long a stream of HTTP lasts before its client has to open it again; 0 for any time."""
    webhook_networks: list[str] = []
    """Networks to which the broker may send webhooks besides the public internet, such as 10.1.0.0/16; `loopback` for
    its own machine."""
    tls_certificate: str = ""
    """PEM file with the certificate of this server, and those between it and its CA. With it, host and port and
    http_address speak TLS; in listen, headraces:// and https:// do."""
    tls_key: str = ""
    """PEM file with the private key; empty if it is in the file of the certificate."""
    tls_key_password_file: str = ""
    """File with the password of an encrypted private key."""
    tls_sni_certificates: list[str] = []
    """Further PEM files, each with a certificate and its key, for clients that ask for one of its names."""
    tls_client_ca: str = ""
    """PEM file with the CAs whose client certificates are accepted; empty to ask for none."""
    tls_client_required: bool = False
    """Refuse clients without a certificate."""
    tls_client_names: list[str] = []
    """Where the name of a client's identity is in its certificate, of uri (headrace:NAME), common_name, dns and email
    the first that is there; by default uri, then common_name."""
    tls_min_version: str = "1.2"
    """The lowest version of TLS: 1.2 or 1.3."""
    tls_handshake_seconds: float = 10.0
    """How long the handshake of TLS may take."""
    authenticator: str = "builtin"
    """Who decides who a client is: builtin (tokens, and the user of the Unix socket), anonymous, which lets everybody
    in as nobody in particular, or the name of a plug-in."""
    jwt_issuer: str = ""
    """The issuer (iss) whose JWTs are accepted; empty to accept none. Needs jwt_audience and jwt_keys."""
    jwt_audience: str = ""
    """What JWTs must name as their audience (aud): a name for this broker that no other service has."""
    jwt_keys: str = ""
    """Public keys of the issuer: the path of a JWKS file, which is read again when it changes, or an https:// URL."""
    jwt_name_claim: str = "sub"
    """The claim of a JWT that names the identity."""
    jwt_tenant_claim: str = ""
    """The claim of a JWT that names the tenant to which the identity belongs, and without which it is refused; empty
    if identities of JWTs belong to none."""
    insecure: bool = False
    """Listen on addresses of the network although security is not enabled: everybody there can do everything."""
    connections_max: int = 10_000
    """The most connections of all gateways at once; further ones are refused with an error that says so."""
    connections_per_address_max: int = 5_000
    """The most connections from one address at once; those on Unix sockets count in connections_max only."""
    connections_per_identity_max: int = _BROKER_DEFAULTS.connections_per_identity_max
    """The most connections of one identity at once; those without credentials, and of the local user, do not count."""
    login_delay_seconds_max: float = 0.25
    """How long the refusal of wrong credentials is held back at most, when an address has failed often; 0: never."""
    heartbeat_ms: int = 5000
    """How often idle clients send a heartbeat, in milliseconds; connections silent for three times as long end."""
    receive_bytes_max: int = 256 << 20
    """Memory for large requests that have arrived only in part, of all connections together."""
    auto_create_topics: bool = _BROKER_DEFAULTS.auto_create_topics
    """Create a topic when somebody publishes to it for the first time, or a reader asks for it with `create`."""
    topics_max: int = _BROKER_DEFAULTS.topics_max
    """The most topics there may be."""
    maintenance_seconds: float = _BROKER_DEFAULTS.maintenance_seconds
    """How often the broker applies retention, and syncs written messages that nobody waits for."""
    compact_seconds: float = _BROKER_DEFAULTS.compact_seconds
    """How often the broker compacts topics with compact_by_key."""
    transaction_seconds_max: float = _BROKER_DEFAULTS.transaction_seconds_max
    """The longest time that a transaction may ask for."""
    transactions_kept_seconds: float = _BROKER_DEFAULTS.transactions_kept_seconds
    """How long the last sequence of a transaction's name is remembered after its last commit."""
    staged_bytes_max: int = _BROKER_DEFAULTS.staged_bytes_max
    """How much all open transactions together may have staged, in files; 10 million messages of 100 bytes are 1 GB."""
    journal_bytes: int = _BROKER_DEFAULTS.journal_bytes
    """The broker's journal is replaced by a snapshot when it is larger, and four times as large as the last one."""
    record_events: bool = _BROKER_DEFAULTS.record_events
    """Record events about the bus from the start, in the topic headrace.events; else once `headrace events` asks."""
    audit: bool = _BROKER_DEFAULTS.audit
    """Record administrative actions, refused attempts and logins in the topic headrace.audit also while security is not
    enabled."""
    result_seconds: float = _BROKER_DEFAULTS.result_seconds
    """How long results of jobs are kept: the retain_seconds of the topic headrace.results when it is created."""
    drain_seconds: float = 10.0
    """How long a server that is asked to stop waits for its clients to finish."""
    log_level: str = "info"
    """How much is logged: debug, info, warning or error."""
    log_format: str = "text"
    """The format of the log: text, or json with one object per line."""
    cluster: str = ""
    """The name of the cluster that this broker is a node of; empty: it is none. Needs store."""
    store: str = ""
    """The shared store of the cluster, as a URL without a password: postgresql://HOST/DATABASE, s3://BUCKET/PREFIX,
    redis://HOST/0, directory:///PATH."""
    node: str = ""
    """The name of this node, which no other node of the cluster has; by default the name of the host and the port."""
    zone: str = ""
    """Where the node is, such as a data centre: shown in lists."""
    advertise: list[str] = []
    """URLs at which clients and other nodes reach this node, such as headrace://10.0.0.7:7390; by default those on
    which it listens, with the name of the host in place of 0.0.0.0 and [::]."""
    cluster_heartbeat_seconds: float = 1.0
    """How often a node renews its record in the store; others take over when an owner's does not change."""
    backup_seconds: float = 3600.0
    """How long old checkpoints and WAL objects are kept in the store, for `headrace restore --at`."""
    checkpoint_bytes: int = 256 << 20
    """An owner writes a checkpoint after so many bytes of WAL objects."""
    checkpoint_seconds: float = 300.0
    """An owner writes a checkpoint after this time, if anything has changed."""
    node_token_file: str = ""
    """File with the token by which this node authenticates to the others; without it, by its certificate."""
    node_ca: str = ""
    """PEM file with the CAs by which this node checks the certificates of the others; by default tls_client_ca, or
    those of the system."""
    node_certificate: str = ""
    """PEM file with the client certificate by which this node authenticates to the others; by default, where
    tls_client_ca is given, tls_certificate."""
    node_key: str = ""
    """PEM file with the private key of node_certificate; empty if it is in the same file."""
    store_credentials_file: str = ""
    """File with the credentials of the store; by default they come from the environment or the driver's own chain."""
    tenant_quotas: list[str] = []
    """Quotas of tenants other than the default one that have none of their own, as NAME=NUMBER: topics=100."""
    topic: dict[str, Any] = {}
    """Default settings of topics, by name: for what the creator of a topic leaves out."""

    def __post_init__(self) -> None:
        if not self.data:
            raise InvalidArgument("data must name a directory")
        _check_path("data", self.data)
        _check_path("unix_socket", self.unix_socket or "")
        _check_host(self.host)
        if self.must_listen and not self.listens:
            raise InvalidArgument(
                "host, unix_socket and listen are all empty: nobody could reach the broker; give one of them"
            )
        _check_listen(self.listen)
        _check_http(self)
        _check_networks(self.webhook_networks)
        _check_tls(self)
        _check_jwt(self)
        _between("port", self.port, 0, 65_535)
        _between("connections_max", self.connections_max, 1, 1_000_000)
        _between("connections_per_address_max", self.connections_per_address_max, 1, 1_000_000)
        _between("login_delay_seconds_max", self.login_delay_seconds_max, 0, 60)
        _between("heartbeat_ms", self.heartbeat_ms, 100, 3_600_000)
        _between("receive_bytes_max", self.receive_bytes_max, 1 << 20, 1 << 50)
        _between("drain_seconds", self.drain_seconds, 0, 86_400)
        _among("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _among("log_format", self.log_format, ("text", "json"))
        check_cluster(self)
        self.broker()

    @property
    def in_memory(self) -> bool:
        """Whether nothing is kept on a disk."""
        return self.data == MEMORY

    @property
    def clustered(self) -> bool:
        """Whether it is a node of a cluster."""
        return bool(self.cluster)

    @property
    def listens(self) -> bool:
        """Whether the server has an address."""
        return bool(self.host or self.socket_path or self.listen or self.http_address)

    @property
    def socket_path(self) -> str:
        """The path of the Unix socket; empty if there is none."""
        if self.unix_socket is not None:
            return self.unix_socket
        return "" if self.in_memory else os.path.join(self.data, SOCKET_NAME)

    def tls(self) -> TlsSettings | None:
        """The settings of TLS; None without a certificate."""
        if not self.tls_certificate:
            return None
        own = {name: getattr(self, f"tls_{name}") for name in TlsSettings.__struct_fields__}
        return msgspec.convert({**own, "client_names": self.tls_client_names or DEFAULT_NAME_RULES}, TlsSettings)

    def broker(self) -> BrokerSettings:
        """The settings of the broker."""
        topic = topic_settings({**({"storage": "memory"} if self.in_memory else {}), **self.topic})
        own = {name: getattr(self, name) for name in BrokerSettings.__struct_fields__ if name != "topic"}
        return BrokerSettings(topic=topic, **own)


class EmbeddedSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a server inside a program, which need not listen anywhere."""

    must_listen: ClassVar[bool] = False
    host: str = ""
    unix_socket: str | None = ""
    drain_seconds: float = 2.0


build_type_info(ServerSettings, EmbeddedSettings)


def _between(name: str, number: float, low: float, high: float) -> None:
    if not low <= number <= high:
        raise InvalidArgument(f"{name} must be {low} to {high}, not {number}")


def _check_path(name: str, path: str) -> None:
    try:
        encoded = os.fsencode(path)
    except UnicodeError as error:
        raise InvalidArgument(f"{name} must be a path that the file system can encode, not {path!r}") from error
    if b"\0" in encoded:
        raise InvalidArgument(f"{name} must be a path without null characters, not {path!r}")


def _check_host(host: str) -> None:
    try:
        encoded = host.encode("idna")  # as the system's resolver will have it
        if b"\0" in encoded:
            raise UnicodeError("it has a null character")
    except UnicodeError as error:
        raise InvalidArgument(f"host must be an address or a name of this machine, not {host!r}: {error}") from error


def _check_listen(urls: list[str]) -> None:
    seen: set[str] = set()
    for url in urls:
        parse_listen_address(url)
        if url in seen and not url.endswith(":0"):
            raise InvalidArgument(f"listen names {url} twice; leave one of them out")
        seen.add(url)


def _check_http(settings: ServerSettings) -> None:
    if settings.http_address:
        address = parse_listen_address(f"http://{settings.http_address}")
        if not address.host or address.path or "@" in address.url or "?" in address.url:
            raise InvalidArgument(f"http_address must be HOST:PORT, not {settings.http_address!r}")
    for origin in settings.http_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise InvalidArgument(f"http_origins must be like https://app.example.org, or *, not {origin!r}")
    for host in settings.http_webhook_origins:
        if host != "*" and not _HOST_NAME.fullmatch(host):
            raise InvalidArgument(f"http_webhook_origins must be like events.example.org, or *, not {host!r}")
    _between("http_body_bytes_max", settings.http_body_bytes_max, 1024, 1 << 30)
    _between("http_request_seconds", settings.http_request_seconds, 0.1, 3600)
    _between("http_idle_seconds", settings.http_idle_seconds, 1, 86_400)
    _between("http_wait_seconds_max", settings.http_wait_seconds_max, 0, 3600)
    _between("http_stream_seconds", settings.http_stream_seconds, 0, 1e8)


def _check_tls(settings: ServerSettings) -> None:
    for name in ("tls_certificate", "tls_key", "tls_key_password_file", "tls_client_ca"):
        _check_path(name, getattr(settings, name))
    needing = [name for name in _NEED_CERTIFICATE if getattr(settings, name)]
    needing += [url for url in settings.listen if url.startswith(tuple(f"{scheme}://" for scheme in TLS_SCHEMES))]
    if needing and not settings.tls_certificate:
        raise InvalidArgument(
            f"{needing[0]} needs tls_certificate; `headrace auth certificate server` makes one for development"
        )
    if settings.tls_client_required and not settings.tls_client_ca:
        raise InvalidArgument("tls_client_required needs tls_client_ca: a file with the CAs of the clients")
    for rule in settings.tls_client_names:
        _among("tls_client_names", rule, NAME_RULES)
    _among("tls_min_version", settings.tls_min_version, ("1.2", "1.3"))
    _between("tls_handshake_seconds", settings.tls_handshake_seconds, 0.1, 3600)


def _check_jwt(settings: ServerSettings) -> None:
    given = [name for name in ("jwt_issuer", "jwt_audience", "jwt_keys") if getattr(settings, name)]
    if given and len(given) < 3:
        raise InvalidArgument(f"{given[0]} needs jwt_issuer, jwt_audience and jwt_keys together")
    if "://" in settings.jwt_keys and not settings.jwt_keys.startswith("https://"):
        raise InvalidArgument("jwt_keys must be the path of a file, or a URL that begins with https://")
    if "://" in settings.jwt_keys and "@" in settings.jwt_keys:
        raise InvalidArgument("jwt_keys is shown in lists of settings: a URL with a password is not accepted")
    _check_path("jwt_keys", settings.jwt_keys)
    if not settings.jwt_name_claim:
        raise InvalidArgument("jwt_name_claim must name a claim, such as sub")
    if given and settings.authenticator != "builtin":
        raise InvalidArgument("JWTs are verified by the authenticator builtin: leave the jwt_ settings out")


def _check_networks(networks: list[str]) -> None:
    if networks:
        from headrace.push.address_guard import parse_networks

        parse_networks(networks)


def replaced_by_listen(given: Container[str]) -> dict[str, str]:
    """The settings whose defaults `listen` replaces: a server that is told where to listen listens nowhere else."""
    replaced = {}
    if "listen" in given:
        if "host" not in given and "port" not in given:
            replaced["host"] = ""
        if "unix_socket" not in given:
            replaced["unix_socket"] = ""
    return replaced


def server_settings(given: dict[str, Any], kind: type[ServerSettings] = ServerSettings) -> ServerSettings:
    """Make settings from plain values by name; an error says which one is wrong."""
    try:
        return msgspec.convert({**replaced_by_listen(given), **given}, kind)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a broker's settings are wrong: {error.object!r} is no text in UTF-8") from error
    except msgspec.ValidationError as error:
        raise InvalidArgument(
            f"a broker's settings are wrong: {error.__cause__ or error}; `headrace serve --print-config` shows them all"
        ) from error


def _among(name: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        raise InvalidArgument(f"{name} must be one of {', '.join(words)}, not {word!r}")
