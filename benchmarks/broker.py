"""The group `broker`: a server and its Python client, beside Redis, NATS, RabbitMQ and Kafka."""

from collections.abc import Callable, Sequence

from benchmarks import broker_install
from benchmarks.broker_kafka import Kafka, KafkaNode
from benchmarks.broker_nats import Nats, NatsNode, NatsTuned
from benchmarks.broker_rabbitmq import RabbitMQ, RabbitNode
from benchmarks.broker_rabbitmq_stream import RabbitStream
from benchmarks.broker_redis import Redis, RedisNode, RedisTuned
from headrace.bench import broker_workloads
from headrace.bench.brokers import (
    CLIENTS,
    Contestant,
    Footprint,
    consuming,
    latency,
    megabytes,
    publishing,
    publishing_single,
    starting,
)
from headrace.bench.measure import Benchmark, Sample, Subject, Unavailable, WrongResult
from headrace.bench.payload import Payload


def benchmarks(*, latency_s: float = 1.0, clients: int = CLIENTS) -> list[Benchmark]:
    """All of the group."""
    payload = Payload()
    beside: dict[str, list[Subject]] = {
        "publish_synced": [publishing(each, payload, synced=True) for each in publishers() if True in each.words],
        "publish_written": [publishing(each, payload, synced=False) for each in publishers()],
        "consume": [consuming(each, payload) for each in consumers()],
        "latency": [latency(each, payload, synced=False) for each in plain()],
        "latency_synced": [latency(each, payload, synced=True) for each in plain() if True in each.words],
        "publish_single_100_clients": [publishing_single(each, payload, clients) for each in awaiting()],
        "footprint": [starting(footprint) for footprint in footprints()],
    }
    ours = broker_workloads.benchmarks(payload, latency_s=latency_s, clients=clients)
    found = [
        benchmark._replace(subjects=[*benchmark.subjects, *map(forgiven, beside.get(name, []))])
        for name, benchmark in ours.items()
    ]
    return [*found, Benchmark({"install_mb": megabytes()}, broker_install.subjects(), {}, 1)]


def forgiven(subject: Subject) -> Subject:
    """Others' servers and clients may fail in ways of their own: that is told, and the rest goes on."""

    def sample(place: str, count: int) -> Sample:
        try:
            return subject.sample(place, count)
        except (Unavailable, WrongResult):
            raise
        except Exception as error:
            raise Unavailable(f"it failed: {error!r}") from error

    return subject._replace(sample=sample)


# Each call makes nodes of its own: subjects of one benchmark may share a server, those of two do not.


def publishers() -> Sequence[Contestant]:
    """All ways to publish batches."""
    redis, nats, rabbit = RedisNode(), NatsNode(), RabbitNode()
    return [
        Redis(redis),
        RedisTuned(redis),
        Nats(nats),
        NatsTuned(nats),
        RabbitMQ(rabbit),
        RabbitStream(rabbit),
        Kafka(KafkaNode()),
    ]


def consumers() -> Sequence[Contestant]:
    """All ways to consume."""
    redis, rabbit = RedisNode(), RabbitNode()
    return [
        Redis(redis),
        RedisTuned(redis),
        Nats(NatsNode()),
        RabbitMQ(rabbit),
        RabbitStream(rabbit),
        Kafka(KafkaNode()),
    ]


def plain() -> Sequence[Contestant]:
    """One or two ways of each, for single messages."""
    rabbit = RabbitNode()
    return [Redis(RedisNode()), Nats(NatsNode()), RabbitMQ(rabbit), RabbitStream(rabbit), Kafka(KafkaNode())]


def awaiting() -> Sequence[Contestant]:
    """Those whose clients can be many in one process."""
    return [Redis(RedisNode()), Nats(NatsNode())]


def footprints() -> Sequence[Footprint]:
    """Each server once."""
    makers: dict[str, tuple[Callable[[], Contestant], str]] = {
        "redis": (lambda: Redis(RedisNode()), "answers PING"),
        "nats": (lambda: Nats(NatsNode()), "greets a connection"),
        "rabbitmq": (lambda: RabbitMQ(RabbitNode(streams=False)), "answers an AMQP client's first bytes; no plugins"),
        "kafka": (lambda: Kafka(KafkaNode()), "answers ApiVersions; files formatted before; 1 GiB heap, as its script"),
    }
    found = []
    for name, (make, ready) in makers.items():
        contestant = make()
        found.append(Footprint(name, contestant.node, {"ready": ready, "durability": contestant.words[False]}))
    return found
