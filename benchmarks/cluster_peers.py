"""Those that replicate by themselves: three NATS servers with streams of three replicas, three Kafka servers."""

import json
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.broker_kafka import API_VERSIONS, Kafka, KafkaNode, java
from benchmarks.broker_nats import Nats, NatsNode, server_path
from headrace.bench.event_loop import run_async
from headrace.bench.measure import Unavailable, check
from headrace.bench.servers import HOST, BenchServer, answers, free_port

SERVERS = 3
_PATIENCE_S = 30.0
_CLUSTER_ID = "AAAAAAAAAAAAAAAAAAAAAQ"


class NatsTrio(NatsNode):
    """Three nats-servers with JetStream, each of which has routes to all."""

    def _start(self, place: str, *, synced: bool) -> None:
        ports, routes = _ports(SERVERS), _ports(SERVERS)
        for number, (port, route) in enumerate(zip(ports, routes, strict=True)):
            home = Path(place) / f"nats-{number}"
            home.mkdir()
            sync = ["  sync_interval: always"] if synced else []
            urls = ", ".join(f"nats://{HOST}:{one}" for one in routes)
            lines = [f"server_name: n{number}", f"host: {HOST}", f"port: {port}", "jetstream {"]
            lines += [f"  store_dir: {json.dumps(str(home))}", *sync, "}"]
            lines += ["cluster {", "  name: bench", f"  host: {HOST}", f"  port: {route}", f"  routes: [{urls}]", "}"]
            settings = home / "nats.conf"
            settings.write_text("\n".join([*lines, ""]), encoding="utf-8")
            self._servers.append(BenchServer([server_path(), "-c", str(settings)], str(home)))
        self.port = ports[0]
        began = time.perf_counter()
        for server, port in zip(self._servers, ports, strict=True):
            server.wait_until(lambda port=port: answers(port, b"", b"INFO "))  # type: ignore[misc]
        run_async(_wait_for_leader(self.port))
        self.ready_s = time.perf_counter() - began


class NatsReplicated(Nats):
    """Streams of three replicas: acknowledged once two of three servers have a message."""

    words: ClassVar[Mapping[bool, str]] = {
        False: "replicated: R3, acknowledged by two of three servers, sync_interval 2m (the default)"
    }
    api: ClassVar[Mapping[str, str]] = {
        **Nats.api,
        "one": "JetStream.publish awaited, one message after the other, one connection (uvloop)",
    }

    def __init__(self) -> None:
        super().__init__(NatsTrio())

    def create(self, topic: str) -> None:
        """Make a stream of one subject and three replicas."""
        run_async(_create(self.node.port, topic))

    def publish_one(self, topic: str, values: Iterable[bytes]) -> list[float]:
        """Publish one after the other; returns what each took."""
        return run_async(_publish_one(self.node.port, topic, values))


async def _nats(port: int) -> Any:
    import nats

    return await nats.connect(f"nats://{HOST}:{port}", allow_reconnect=False)


async def _wait_for_leader(port: int) -> None:
    """Wait until JetStream has a leader, which makes streams."""
    from nats.js.errors import Error

    client = await _nats(port)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            await client.jetstream(timeout=1.0).account_info()
            break
        except (Error, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise Unavailable(f"JetStream has no leader: {error!r}") from error
    await client.close()


async def _create(port: int, topic: str) -> None:
    from nats.js.api import StreamConfig
    from nats.js.errors import ServiceUnavailableError

    client = await _nats(port)
    stream = StreamConfig(name=topic, subjects=[topic], allow_atomic=True, num_replicas=SERVERS)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            await client.jetstream(timeout=_PATIENCE_S).add_stream(stream)
            break
        except ServiceUnavailableError:  # servers that have not found each other yet
            if time.monotonic() > deadline:
                raise
    await client.close()


async def _publish_one(port: int, topic: str, values: Iterable[bytes]) -> list[float]:
    client = await _nats(port)
    stream = client.jetstream(timeout=_PATIENCE_S)
    taken = []
    for value in values:
        begin = time.perf_counter()
        await stream.publish(topic, value)
        taken.append(time.perf_counter() - begin)
    await client.close()
    return taken


class KafkaTrio(KafkaNode):
    """Three Kafka servers that are their own controllers."""

    def _start(self, place: str, *, synced: bool) -> None:
        self.synced = synced
        ports, controllers = _ports(SERVERS), _ports(SERVERS)
        voters = ",".join(f"{number}@{HOST}:{port}" for number, port in enumerate(controllers, 1))
        files = []
        for number, (port, controller) in enumerate(zip(ports, controllers, strict=True), 1):
            home = Path(place) / f"kafka-{number}"
            home.mkdir()
            files.append(_write_settings(home, number, port, controller, voters))
        for file in files:
            _format(file)
        for file in files:
            command = [*java(), "kafka.Kafka", str(file)]
            self._servers.append(BenchServer(command, str(file.parent)))
        self.port = ports[0]
        for server, port in zip(self._servers, ports, strict=True):
            server.wait_until(lambda port=port: answers(port, API_VERSIONS, b"\x00"))  # type: ignore[misc]


class KafkaReplicated(Kafka):
    """Three replicas, all of which have a message before it is acknowledged."""

    words: ClassVar[Mapping[bool, str]] = {
        False: "replicated: acks=all, three replicas, min.insync.replicas=2; flush left to the operating systems"
    }
    api: ClassVar[Mapping[str, str]] = {
        **Kafka.api,
        "one": "confluent-kafka Producer.produce with linger.ms=0, then flush; one message after the other",
    }

    def __init__(self) -> None:
        super().__init__(KafkaTrio())

    def create(self, topic: str) -> None:
        """Make a topic of one partition and three replicas."""
        from confluent_kafka.admin import NewTopic

        made = NewTopic(topic, 1, SERVERS, config={"min.insync.replicas": "2"})
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._administer(lambda admin: admin.create_topics([made]))
            except Exception:  # fewer than three servers are known yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def publish_one(self, topic: str, values: Iterable[bytes]) -> list[float]:
        """Publish one after the other; returns what each took."""
        producer = self._producer(topic, **{"linger.ms": 0})
        taken = []
        for value in values:
            begin = time.perf_counter()
            producer.produce(topic, value)
            check(producer.flush(_PATIENCE_S) == 0, "a message was not acknowledged")
            taken.append(time.perf_counter() - begin)
        return taken


def _write_settings(home: Path, number: int, port: int, controller: int, voters: str) -> Path:
    settings = {
        "process.roles": "broker,controller",
        "node.id": number,
        "controller.quorum.voters": voters,
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "log.dirs": f"{home}/data",
        "offsets.topic.replication.factor": SERVERS,
        "group.initial.rebalance.delay.ms": 0,
    }
    file = home / "server.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="utf-8")
    return file


def _format(settings: Path) -> None:
    command = [*java(), "kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", str(settings)]
    made = subprocess.run(command, cwd=settings.parent, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if made.returncode:
        raise Unavailable(f"it could not make its files: {made.stderr.decode(errors='replace')[-500:]}")


def _ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = free_port()
        if port not in found:
            found.append(port)
    return found
