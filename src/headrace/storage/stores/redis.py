"""A shared store in one Redis server that syncs every change."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument, StoreUnavailable, StoreUnqualified
from headrace.storage.stores.address import StoreAddress
from headrace.storage.stores.advice import with_advice
from headrace.storage.stores.store import (
    KeyExists,
    SharedStore,
    StoredObject,
    VersionMismatch,
    check_object,
    prefix_end,
)

PREFIX = "headrace"
CONNECTIONS = 8
# The object KEYS[1] is a hash: d has its data, v its version. KEYS[2] has the names of all, KEYS[3] the last version.
_PUT_NEW = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'd', ARGV[1], 'v', redis.call('INCR', KEYS[3]))
redis.call('ZADD', KEYS[2], 0, ARGV[2])
return 1
"""
_REPLACE = """
if redis.call('HGET', KEYS[1], 'v') ~= ARGV[2] then return 0 end
local version = redis.call('INCR', KEYS[3])
redis.call('HSET', KEYS[1], 'd', ARGV[1], 'v', version)
return version
"""
_DELETE = """
for at = 1, #ARGV do
    redis.call('DEL', KEYS[at + 1])
    redis.call('ZREM', KEYS[1], ARGV[at])
end
return #ARGV
"""
_DELETED_AT_ONCE = 500

T = TypeVar("T")


class RedisStore(SharedStore):
    """A store in one Redis server. It refuses a server that may lose what it has confirmed, unless `check` is off.

    Redis answers only after it has synced its append-only file if `appendfsync` is `always`. Its replicas are
    asynchronous: a failover to one loses what was confirmed.
    """

    def __init__(
        self,
        location: str,
        parameters: dict[str, Any],
        *,
        prefix: str = PREFIX,
        connections: int = CONNECTIONS,
        timeout_s: float = 10.0,
        check: bool = True,
    ) -> None:
        """Keep the parameters of the connections; the first request connects."""
        self._location = location
        self._prefix = prefix
        self._names = f"{prefix}:names"
        self._versions = f"{prefix}:versions"
        self._check = check
        self._lock = threading.Lock()
        self._checked = False
        self._closed = False
        pool = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
            **parameters,
            max_connections=connections,
            timeout=max(1, round(timeout_s)),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),  # whoever repeats a change must know that it does
            client_name="headrace",
        )
        self._client: redis.Redis = redis.Redis(connection_pool=pool)
        self._put_new = self._client.register_script(_PUT_NEW)
        self._replace = self._client.register_script(_REPLACE)
        self._delete = self._client.register_script(_DELETE)

    @property
    def location(self) -> str:
        """Where it is."""
        return self._location

    def put_new(self, key: str, data: bytes) -> None:
        """Create an object; raises KeyExists if there is one."""
        check_object(key, data)
        if not self._run(lambda: self._put_new(keys=self._keys(key), args=[data, key])):
            raise KeyExists(key)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace an object if it has this version; returns the new version."""
        check_object(key, data)
        new = self._run(lambda: self._replace(keys=self._keys(key), args=[data, version]))
        if not new:
            raise VersionMismatch(key)
        return str(new)

    def get(self, key: str) -> StoredObject | None:
        """Read an object; None if there is none."""
        found: Any = self._run(lambda: self._client.hmget(self._keys(key)[0], ["d", "v"]))
        return None if found[1] is None else StoredObject(found[0], found[1].decode())

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        """The first keys with a prefix behind `after`."""
        first = f"({after}" if after and after >= prefix else f"[{prefix}" if prefix else "-"
        last = f"({prefix_end(prefix)}" if prefix else "+"
        found: Any = self._run(lambda: self._client.zrangebylex(self._names, first, last, 0, count_max))
        return [name.decode() for name in found]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            some = keys[start : start + _DELETED_AT_ONCE]
            objects = [self._names, *(self._keys(key)[0] for key in some)]
            self._run(partial(self._delete, keys=objects, args=list(some)))

    def remarks(self) -> list[str]:
        """What the server's settings say of how it may lose what it has confirmed."""
        remarks = ["the store is one Redis server: a failover to a replica loses what it has confirmed"]
        return remarks + self._explained(lambda: _risks(self._client))

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._client.connection_pool.disconnect()

    def _keys(self, key: str) -> list[str]:
        return [f"{self._prefix}:objects:{key}", self._names, self._versions]

    def _run(self, call: Callable[[], T]) -> T:
        if not self._checked:
            self._qualify()
        return self._explained(call)

    def _explained(self, call: Callable[[], T]) -> T:
        if self._closed:
            raise StoreUnavailable(f"the store {self._location} is closed")
        try:
            return call()
        except redis.RedisError as error:
            told = with_advice(str(error) or type(error).__name__)
            raise StoreUnavailable(f"the store {self._location} failed: {told}") from error

    def _qualify(self) -> None:
        """Refuse a server that may lose what it has confirmed."""
        with self._lock:
            if self._check and not self._checked and (risks := self._explained(lambda: _risks(self._client))):
                raise StoreUnqualified(
                    f"no cluster can use the store {self._location}: {'; '.join(risks)}. Change the server, or add "
                    "the option check=false to the URL if losing messages is acceptable"
                )
            self._checked = True


def open_redis(address: StoreAddress) -> RedisStore:
    """The store in a database of a Redis server; its password comes from REDIS_PASSWORD or the credentials file."""
    address.check_options("prefix", "timeout", "connections", "check", "ca", "certificate", "certificate_private")
    number = address.path.strip("/") or "0"
    if not (number.isascii() and number.isdigit()):
        raise InvalidArgument(f"a store in Redis is redis://host:port/NUMBER of the database, not {shown(number)}")
    parameters: dict[str, Any] = {
        "host": address.host or "localhost",
        "port": address.port or 6379,
        "db": int(number),
        "username": address.user or address.secrets.get("REDIS_USERNAME"),
        "password": address.secrets.get("REDIS_PASSWORD"),
    }
    if address.scheme == "rediss":
        files = {"ssl_ca_certs": "ca", "ssl_certfile": "certificate", "ssl_keyfile": "certificate_private"}
        parameters["connection_class"] = redis.SSLConnection
        parameters.update(
            {name: address.options[option] for name, option in files.items() if option in address.options}
        )
    return RedisStore(
        address.location,
        parameters,
        prefix=address.options.get("prefix", PREFIX),
        connections=address.count("connections", CONNECTIONS, 100),
        timeout_s=address.seconds(),
        check=address.flag("check", True),
    )


open_redis.api = 1  # type: ignore[attr-defined]


def _risks(client: redis.Redis) -> list[str]:
    """Why a server may lose what it has confirmed."""
    try:
        found: Any = client.config_get("append*") | client.config_get("maxmemory-policy")
    except (redis.ResponseError, redis.exceptions.NoPermissionError) as error:
        if "DB index" in str(error):
            raise
        return [f"its settings cannot be read ({error}): allow the command CONFIG GET to the user"]
    told = {_text(name): _text(value) for name, value in found.items()}
    risks = []
    if told.get("appendonly") != "yes":
        risks.append("Redis has appendonly no: a restart loses what it has confirmed; set appendonly yes")
    if told.get("appendfsync") != "always":
        risks.append(
            f"Redis has appendfsync {told.get('appendfsync')}: a power loss loses what it has confirmed; set "
            "appendfsync always"
        )
    if told.get("maxmemory-policy", "noeviction").startswith("allkeys"):
        risks.append(
            f"Redis has maxmemory-policy {told['maxmemory-policy']}: it deletes objects when it is full; set noeviction"
        )
    information: Any = client.info()
    if information.get("role") != "master":
        risks.append("this Redis is a replica: give the address of its master")
    if information.get("cluster_enabled"):
        risks.append("this Redis is part of a Redis Cluster, which fails over to asynchronous replicas: use one server")
    return risks


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
