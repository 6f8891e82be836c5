"""The settings of a server, and their checks."""

import os
import re
from collections.abc import Container
from typing import Any, ClassVar

import msgspec

from headrace.broker.settings import BrokerSettings
from headrace.gateways.addresses import parse_listen_address
from headrace.model.errors import InvalidArgument
from headrace.model.topic import topic_settings
from headrace.wire.native import DEFAULT_PORT

MEMORY = ":memory:"
"""Instead of a directory: keep everything in memory."""
SOCKET_NAME = "headrace.sock"

_BROKER_DEFAULTS = BrokerSettings()
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


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
    """Addresses to listen on, as URLs: headrace://HOST:PORT, unix:///PATH, or the scheme of a plug-in's gateway.
    Given alone it replaces the defaults of host, port and unix_socket, which are the short form for the first."""
    http_address: str = ""
    """HOST:PORT on which HTTP is served; empty for none. `headrace serve` takes 127.0.0.1:7391 if the extra `http` is
    installed and no other address is given."""
    http_hosts: list[str] = []
    """Names by which clients may call the broker over HTTP, besides localhost and addresses in numbers; `*` for any."""
    http_origins: list[str] = []
    """Origins of web pages that may use the broker over HTTP, such as https://app.example.org; `*` for any."""
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
    authenticator: str = "anonymous"
    """Who decides who a client is: anonymous, which lets everybody in, or the name of a plug-in."""
    connections_max: int = 10_000
    """The most connections of all gateways at once; further ones are refused with an error that says so."""
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
    result_seconds: float = _BROKER_DEFAULTS.result_seconds
    """How long results of jobs are kept: the retain_seconds of the topic headrace.results when it is created."""
    drain_seconds: float = 10.0
    """How long a server that is asked to stop waits for its clients to finish."""
    log_level: str = "info"
    """How much is logged: debug, info, warning or error."""
    log_format: str = "text"
    """The format of the log: text, or json with one object per line."""
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
        _between("port", self.port, 0, 65_535)
        _between("connections_max", self.connections_max, 1, 1_000_000)
        _between("heartbeat_ms", self.heartbeat_ms, 100, 3_600_000)
        _between("receive_bytes_max", self.receive_bytes_max, 1 << 20, 1 << 50)
        _between("drain_seconds", self.drain_seconds, 0, 86_400)
        _among("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _among("log_format", self.log_format, ("text", "json"))
        self.broker()

    @property
    def in_memory(self) -> bool:
        """Whether nothing is kept on a disk."""
        return self.data == MEMORY

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
    _between("http_body_bytes_max", settings.http_body_bytes_max, 1024, 1 << 30)
    _between("http_request_seconds", settings.http_request_seconds, 0.1, 3600)
    _between("http_idle_seconds", settings.http_idle_seconds, 1, 86_400)
    _between("http_wait_seconds_max", settings.http_wait_seconds_max, 0, 3600)
    _between("http_stream_seconds", settings.http_stream_seconds, 0, 1e8)


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
