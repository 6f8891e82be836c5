"""How long a message takes through a streaming query: from its publisher, by Spark, to a consumer of the sink."""

import abc
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import broker_kafka, spark_session
from headrace.bench import broker_workloads
from headrace.bench.brokers import Contestant, PublishPace
from headrace.bench.measure import Figure, Sample, Subject, Unavailable, check
from headrace.bench.payload import Payload
from headrace.bench.receiver import Receiver
from headrace.bench.servers import HOST

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RATE = 20
"""Messages in a second: a few for each trigger, at no special moment of it."""
MESSAGES = 100
_WARM_UP = 10
_PATIENCE_S = 60.0
_POLL_S = 0.02

QUICK = {
    "spark.sql.streaming.pollingDelay": "1ms",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}
"""What makes triggers short: no checksums of the checkpoint's files, and no rename by way of a second file system."""
_QUICK_WORDS = "without checksums of the checkpoint's files (see docs), polling every millisecond"


class Pipe(abc.ABC):
    """A query from one topic to another."""

    def __init__(self, name: str, contestant: Contestant, *, quick: bool = True) -> None:
        self.name = name
        self.contestant = contestant
        self.quick = quick

    def find(self) -> dict[str, str]:
        """Make sure that Spark can do it; returns what else is told."""
        spark_session.session()
        return {}

    @abc.abstractmethod
    def source(self, reader: Any, topic: str) -> "DataFrame":
        """The topic that is read."""

    @abc.abstractmethod
    def sink(self, writer: Any, topic: str) -> Any:
        """The topic that is written."""

    def start(self, source: str, sink: str, place: str) -> Any:
        """Start the query, as soon after one trigger as can be the next."""
        session = spark_session.session()
        with _settings(session, QUICK if self.quick else {}):
            rows = self.source(session.readStream, source).selectExpr("key", "value")
            writer = self.sink(rows.writeStream, sink).option("checkpointLocation", f"{place}/checkpoint")
            return writer.trigger(processingTime="0 seconds").start()

    @property
    def params(self) -> dict[str, Any]:
        """What is told of it."""
        settings = _QUICK_WORDS if self.quick else "as Spark has them"
        return {"settings": settings, "api": self.contestant.api["latency"]}


class HeadracePipe(Pipe):
    """This project's source and sink."""

    def source(self, reader: Any, topic: str) -> "DataFrame":
        """From the broker."""
        return self._at(reader).option("subscribe", topic).option("startingOffsets", "earliest").load()

    def sink(self, writer: Any, topic: str) -> Any:
        """To the broker."""
        return self._at(writer).option("topic", topic)

    def _at(self, what: Any) -> Any:
        node: Any = self.contestant.node
        return what.format("headrace").option("address", node.address)

    @property
    def params(self) -> dict[str, Any]:
        """Durable as the topics are."""
        return {**super().params, "durability": f"{self.contestant.words[False]}; exactly once"}


class KafkaPipe(Pipe):
    """Spark's own connector."""

    def find(self) -> dict[str, str]:
        """Make sure of the connector."""
        return {"connector": spark_session.connector()}

    def source(self, reader: Any, topic: str) -> "DataFrame":
        """From Kafka."""
        return self._at(reader).option("subscribe", topic).option("startingOffsets", "earliest").load()

    def sink(self, writer: Any, topic: str) -> Any:
        """To Kafka."""
        asynchronous = {"asyncProgressTrackingEnabled": "true"} if self.quick else {}
        return self._at(writer).option("topic", topic).options(**asynchronous)

    def _at(self, what: Any) -> Any:
        node: Any = self.contestant.node
        return what.format("kafka").option("kafka.bootstrap.servers", f"{HOST}:{node.port}")

    @property
    def params(self) -> dict[str, Any]:
        """Durable as the topics are."""
        told = {**super().params, "durability": f"{self.contestant.words[False]}; at least once"}
        return {**told, "settings": f"{told['settings']}; asyncProgressTrackingEnabled"} if self.quick else told


@contextlib.contextmanager
def _settings(session: Any, settings: Mapping[str, str]) -> Iterator[None]:
    """Have a query started with settings: it keeps those of the moment it starts."""
    for name, value in settings.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            session.conf.unset(name)


def trigger_ms() -> Figure:
    """What a trigger with a few messages takes: what Spark needs however little there is."""
    return Figure("ms", False, lambda _, taken: taken.amount)


def passing() -> list[Subject]:
    """A message published, taken up by a query, written to another topic, and received by another process."""
    headrace, kafka = broker_workloads.Headrace(), broker_kafka.Kafka(broker_kafka.KafkaNode())
    pipes = [
        HeadracePipe("headrace", headrace),
        HeadracePipe("headrace_default_settings", headrace, quick=False),
        KafkaPipe("kafka", kafka),
        KafkaPipe("kafka_default_settings", kafka, quick=False),
    ]
    return [_subject(pipe, Payload()) for pipe in pipes]


_numbers = itertools.count()


def _subject(pipe: Pipe, payload: Payload) -> Subject:
    contestant, params = pipe.contestant, pipe.params
    receivers: list[Receiver] = []

    def prepare(place: str) -> None:
        params.update(pipe.find())
        contestant.node.start(place, synced=False)
        try:
            receivers.append(Receiver(contestant.receive()))
            sample(f"{place}/warm-up", _WARM_UP)
        except BaseException:
            finish()
            raise

    def finish() -> None:
        while receivers:
            receivers.pop().close()
        contestant.node.stop()

    def sample(place: str, count: int) -> Sample:
        source, sink = (f"pipe{next(_numbers)}" for _ in range(2))
        contestant.create(source)
        contestant.create(sink)
        values = list(payload.values(_WARM_UP + count))
        with receivers[0].receiving(sink, len(values)) as arrived:
            query = pipe.start(source, sink, place)
            try:
                contestant.publish_paced(source, values[:_WARM_UP], PublishPace(RATE))
                before = _triggers_until(query, _WARM_UP)
                begun = contestant.publish_paced(source, values[_WARM_UP:], PublishPace(RATE))
                times, received = arrived()
                _triggers_until(query, len(values))  # a trigger is reported a moment after its messages arrive
                triggers = _busy(query)[before:]
            finally:
                query.stop()
        check(list(received) == values, "other messages came out than went in")
        contestant.delete(source)
        contestant.delete(sink)
        latencies = [(after - at) / 1e9 for at, after in zip(begun, times[_WARM_UP:], strict=True)]
        return Sample((begun[-1] - begun[0]) / 1e9, latencies, statistics.median(triggers))

    return Subject(pipe.name, sample, params, prepare=prepare, finish=finish)


def _triggers_until(query: Any, count: int) -> int:
    """Wait until a query has reported that it read so many messages; returns how many triggers that took."""
    deadline = time.monotonic() + _PATIENCE_S
    while sum(progress.numInputRows for progress in query.recentProgress) < count:
        if query.exception() is not None:
            raise query.exception()
        if time.monotonic() > deadline:
            raise Unavailable(f"the query has not read {count} messages in {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)
    return len(_busy(query))


def _busy(query: Any) -> Sequence[float]:
    """The milliseconds that each trigger took that had something to do."""
    return [progress.durationMs["triggerExecution"] for progress in query.recentProgress if progress.numInputRows]
