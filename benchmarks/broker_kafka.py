"""Kafka, from its jars, with confluent-kafka (librdkafka)."""

import functools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import installing
from headrace.bench.brokers import Contestant, PublishPace, Take
from headrace.bench.measure import Unavailable, check
from headrace.bench.payload import Payload
from headrace.bench.receiver import Arrived, Receive
from headrace.bench.servers import HOST, ServerNode, answers, free_port

VERSION = "4.1.0"
_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>benchmark</groupId><artifactId>kafka</artifactId><version>1</version>
<dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version></dependency>
<dependency><groupId>org.slf4j</groupId><artifactId>slf4j-nop</artifactId><version>1.7.36</version></dependency>
</dependencies></project>
"""
_HEAP = ["-Xms1G", "-Xmx1G", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"]
"""As Kafka's own start script has it."""
API_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 1, -1)
"""A request that every broker answers: its length, its number, version 0, correlation 1, no client name."""
_PATIENCE_S = 30.0
_COUNT = 1000
_WARM_UPS, _WARM_UP_COUNT, _WARM_UP_SINGLES = 10, 50_000, 1000
_QUICK = {"linger.ms": 1}
"""Not 0: a request for each message is more than the server takes when it has not much of the machine."""


def jars_directory() -> Path:
    """Where the jars are kept, once they are there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace-benchmarks" / f"kafka-{VERSION}"


@functools.cache
def jars() -> Path:
    """A directory with the jars, which Maven gets the first time."""
    if shutil.which("java") is None:
        raise Unavailable("there is no java")
    found = jars_directory()
    kept = found.parent
    if not found.is_dir():
        if shutil.which("mvn") is None:
            raise Unavailable("there is no mvn to get Kafka's jars with")
        print("benchmarks: getting Kafka's jars", file=sys.stderr, flush=True)
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept) as place:
            (Path(place) / "pom.xml").write_text(_POM, encoding="utf-8")
            command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"]
            command.append("-DoutputDirectory=jars")
            done = subprocess.run(command, cwd=place, stdin=subprocess.DEVNULL, capture_output=True, check=False)
            if done.returncode:
                raise Unavailable("Maven could not get Kafka's jars")
            (Path(place) / "jars").rename(found)
    return found


class KafkaNode(ServerNode):
    """One Kafka server that is its own controller."""

    port = 0
    synced = False

    def find(self) -> None:
        """Make sure of the server and the client."""
        jars()
        installing.wheel("confluent_kafka", "confluent-kafka")

    def _start(self, place: str, *, synced: bool) -> None:
        self.port = free_port()
        self.synced = synced
        for name, content in _formatted().items():
            file = Path(place) / "data" / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
        settings = _write_settings(place, self.port)
        self._launch([*java(), "kafka.Kafka", settings], place, lambda: answers(self.port, API_VERSIONS, b"\x00"))


def java() -> list[str]:
    """The beginning of a command that runs one of Kafka's programs."""
    return ["java", *_HEAP, "-cp", f"{jars()}/*"]


def _write_settings(place: str, port: int) -> str:
    controller = free_port()
    settings = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@{HOST}:{controller}",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "log.dirs": f"{place}/data",
        "offsets.topic.replication.factor": 1,
        "group.initial.rebalance.delay.ms": 0,
    }
    file = Path(place) / "server.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="utf-8")
    return str(file)


@functools.cache
def _formatted() -> dict[str, bytes]:
    """The files that a server wants to find; making them takes Java a while, and once is enough."""
    with tempfile.TemporaryDirectory() as place:
        tool = [*java(), "kafka.tools.StorageTool", "format", "-t", "AAAAAAAAAAAAAAAAAAAAAQ", "-c"]
        command = [*tool, _write_settings(place, free_port())]
        made = subprocess.run(command, cwd=place, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if made.returncode:
            raise Unavailable(f"it could not make its files: {made.stderr.decode(errors='replace')[-500:]}")
        return {file.name: file.read_bytes() for file in (Path(place) / "data").iterdir() if file.is_file()}


class Kafka(Contestant):
    """One partition, as all others have."""

    name = "kafka"
    words: ClassVar[Mapping[bool, str]] = {
        False: "written: acks=all, with the page cache of the one replica; flush.messages left to the system",
        True: "synced: acks=all, flush.messages=1 (each batch is synced before it is acknowledged)",
    }
    api: ClassVar[Mapping[str, str]] = {
        "publish": "confluent-kafka Producer.produce, linger.ms=5, batch.num.messages=1000, flush at the end",
        "consume": f"confluent-kafka Consumer.consume({_COUNT}), then Message.value of each",
        "latency": "confluent-kafka Producer.produce with linger.ms=1 here, Consumer.poll in another process",
    }
    node: KafkaNode

    def create(self, topic: str) -> None:
        """Make a topic of one partition."""
        from confluent_kafka.admin import NewTopic

        config = {"flush.messages": "1"} if self.node.synced else {}
        self._administer(lambda admin: admin.create_topics([NewTopic(topic, 1, 1, config=config)]))

    def delete(self, topic: str) -> None:
        """Drop a topic."""
        self._administer(lambda admin: admin.delete_topics([topic]))

    def _administer(self, work: Callable[[Any], dict[str, Any]]) -> None:
        from confluent_kafka.admin import AdminClient

        admin = AdminClient(_settings(self.node.port))
        for result in work(admin).values():
            result.result(_PATIENCE_S)

    def _producer(self, topic: str, **more: Any) -> Any:
        from confluent_kafka import Producer

        producer = Producer({**_settings(self.node.port), "acks": "all", **more})
        producer.list_topics(topic, timeout=_PATIENCE_S)
        return producer

    def publish(self, topic: str, batches: Iterable[list[bytes]]) -> float:
        """A call for each message; librdkafka makes the batches."""
        settings = {"linger.ms": 5, "batch.num.messages": 1000, "queue.buffering.max.messages": 10_000_000}
        producer = self._producer(topic, **settings)
        produce = producer.produce
        begin = time.perf_counter()
        for values in batches:
            for value in values:
                produce(topic, value)
            producer.poll(0)
        left = producer.flush(_PATIENCE_S)
        seconds = time.perf_counter() - begin
        check(left == 0, f"{left} messages were not acknowledged")
        return seconds

    def consume(self, topic: str, count: int, take: Take) -> float:
        """A list of messages after the other."""
        consumer = _consumer(self.node.port, topic)
        begin = time.perf_counter()
        seen = 0
        while seen < count:
            messages = consumer.consume(min(_COUNT, count - seen), _PATIENCE_S)
            check(bool(messages), f"no more than {seen} messages came of {count}")
            take([message.value() for message in messages])
            seen += len(messages)
        seconds = time.perf_counter() - begin
        consumer.close()
        return seconds

    def warm_up(self, payload: Payload) -> None:
        """Give Java something to compile."""
        topic = "warm-up"
        self.create(topic)
        for _ in range(_WARM_UPS):
            self.publish(topic, payload.batches(_WARM_UP_COUNT))
            self.consume(topic, _WARM_UP_COUNT, lambda _: None)
        producer = self._producer(topic, **_QUICK)
        for value in payload.values(_WARM_UP_SINGLES):
            producer.produce(topic, value)
            producer.flush()
        self.delete(topic)

    def publish_paced(self, topic: str, values: Iterable[bytes], pace: PublishPace) -> list[int]:
        """Without waiting for one before the next."""
        producer = self._producer(topic, **_QUICK)
        begun = []
        for value in values:
            begun.append(pace.wait())
            producer.produce(topic, value)
            producer.poll(0)
        check(producer.flush(_PATIENCE_S) == 0, "not all messages were acknowledged")
        return begun

    def receive(self) -> Receive:
        """One message a call."""
        return functools.partial(_receive, self.node.port)


def _settings(port: int) -> dict[str, Any]:
    return {"bootstrap.servers": f"{HOST}:{port}", "log_level": 0, "socket.nagle.disable": True}


def _consumer(port: int, topic: str) -> Any:
    from confluent_kafka import Consumer, TopicPartition

    settings = {"group.id": "bench", "enable.auto.commit": False, "auto.offset.reset": "earliest"}
    consumer = Consumer({**_settings(port), **settings, "fetch.error.backoff.ms": 0})
    consumer.assign([TopicPartition(topic, 0, 0)])
    return consumer


def _receive(port: int, topic: str, count: int, ready: Callable[[], None]) -> Arrived:
    times: list[int] = []
    values: list[bytes] = []
    consumer = _consumer(port, topic)
    consumer.poll(0.5)
    ready()
    while len(values) < count:
        message = consumer.poll(_PATIENCE_S)
        times.append(time.monotonic_ns())
        check(message is not None and message.error() is None, "no message came")
        values.append(message.value())
    consumer.close()
    return Arrived(times, values)
