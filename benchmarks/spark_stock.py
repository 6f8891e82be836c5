"""What Spark reads: the same rows in a topic, in Parquet files and in a topic of Kafka's, made once for a run."""

from pathlib import Path
from typing import Any

from benchmarks import spark_rows, spark_session
from benchmarks.broker_kafka import Kafka, KafkaNode
from headrace.bench.broker_workloads import HeadraceNode
from headrace.bench.measure import check
from headrace.bench.servers import HOST
from headrace.client._sync.connecting import connect

TOPIC = "rows"
_PATIENCE_S = 60.0


class KeptKafkaNode(KafkaNode):
    """A Kafka server that is started again with what it had."""

    def _stop(self) -> None:
        while self._servers:
            self._servers.pop().stop(gently=True)


class Stock:
    """Servers and files, each made when it is first needed; servers stop in between, what they hold stays."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.verified: set[str] = set()
        """What of it was compared with what should be there."""
        self.broker = HeadraceNode()
        self.kafka = KeptKafkaNode()
        self._home = Path()
        self._made: set[str] = set()

    def open_topic(self, place: str) -> None:
        """Have the broker run, with its topic."""
        self.broker.start(self._kept(place, "headrace"), synced=False)
        try:
            self._make("headrace", self._fill_topic)
        except BaseException:
            self.broker.stop()
            raise

    def open_parquet(self, place: str) -> None:
        """Have the files, which need no server."""
        if "parquet" in self._made:
            return
        self.open_topic(place)
        try:
            self._kept(place, "parquet")
            self._make("parquet", self._write_parquet)
        finally:
            self.broker.stop()

    def open_kafka(self, place: str) -> None:
        """Have Kafka run, with its topic."""
        spark_session.connector()
        self.kafka.start(self._kept(place, "kafka"), synced=False)
        try:
            self._make("kafka", self._fill_kafka)
        except BaseException:
            self.kafka.stop()
            raise

    @property
    def data(self) -> str:
        """The broker's data directory."""
        return str(self._home / "headrace" / "data")

    @property
    def parquet(self) -> str:
        """The directory of the Parquet files."""
        return str(self._home / "parquet" / "rows")

    @property
    def kafka_servers(self) -> str:
        """What Kafka's clients are told."""
        return f"{HOST}:{self.kafka.port}"

    def _kept(self, place: str, name: str) -> str:
        """A directory beside that of a subject: it stays until the run is over."""
        self._home = Path(place).parent / "spark"
        (self._home / name).mkdir(parents=True, exist_ok=True)
        return str(self._home / name)

    def _make(self, what: str, make: Any) -> None:
        if what not in self._made:
            make()
            self._made.add(what)

    def _fill_topic(self) -> None:
        with connect(self.broker.address) as bus:
            durability = self.broker.durability.name.lower()
            bus.create_topic(TOPIC, partitions=spark_rows.PARTITIONS, durability=durability)
            with bus.producer(TOPIC) as producer:
                for chunk in spark_rows.chunks(self.rows):
                    producer.send_many(
                        chunk.values,
                        chunk.keys,
                        timestamps=[at_ms * 1000 for at_ms in chunk.times_ms],
                        partition=chunk.partition,
                    )
            there = sum(bus.offsets(TOPIC).values())
        check(there == self.rows, f"{there} messages are in the topic, not {self.rows}")

    def _write_parquet(self) -> None:
        reader = spark_session.session().read.format("headrace").option("address", self.broker.address)
        reader.option("subscribe", TOPIC).load().write.parquet(self.parquet)

    def _fill_kafka(self) -> None:
        from confluent_kafka.admin import NewTopic

        kafka = Kafka(self.kafka)
        # Rows are older than Kafka keeps messages otherwise.
        topic = NewTopic(TOPIC, spark_rows.PARTITIONS, 1, config={"retention.ms": "-1"})
        kafka._administer(lambda admin: admin.create_topics([topic]))
        most = {"linger.ms": 20, "batch.num.messages": spark_rows.BATCH, "queue.buffering.max.messages": 1_000_000}
        producer = kafka._producer(TOPIC, **most)
        for chunk in spark_rows.chunks(self.rows):
            for key, value, at_ms in zip(chunk.keys, chunk.values, chunk.times_ms, strict=True):
                producer.produce(TOPIC, value, key, chunk.partition, timestamp=at_ms)
            while len(producer) > most["queue.buffering.max.messages"] // 2:
                producer.poll(0.01)
            producer.poll(0)
        left = producer.flush(_PATIENCE_S)
        check(left == 0, f"{left} messages were not acknowledged")
