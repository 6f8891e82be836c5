"""The group `leased`: work queues and timelines, beside Redis, RabbitMQ, PostgreSQL, NATS and three task queues."""

from collections.abc import Sequence

from benchmarks import broker
from benchmarks.broker_nats import NatsNode
from benchmarks.broker_rabbitmq import RabbitNode
from benchmarks.broker_redis import RedisNode
from benchmarks.leased_celery import Celery, CeleryNode
from benchmarks.leased_huey import Huey, HueyNode
from benchmarks.leased_nats import NatsQueue
from benchmarks.leased_postgres import Postgres, PostgresNode, PostgresTransaction
from benchmarks.leased_procrastinate import Procrastinate, ProcrastinateNode
from benchmarks.leased_rabbitmq import RabbitPrefetching, RabbitQueue
from benchmarks.leased_redis import RedisOverlapped, RedisQueue
from benchmarks.leased_tasks import TaskQueue
from headrace.bench import leased_pending, leased_workloads
from headrace.bench.leased_pending import MILLION
from headrace.bench.measure import Benchmark, Subject, Unavailable, WrongResult
from headrace.bench.payload import Payload
from headrace.bench.queues import (
    BATCH,
    CONSUMERS,
    Timeline,
    WorkQueue,
    enqueueing,
    keeping_time,
    leasing_batches,
    leasing_singles,
)

_FEW = 100
"""Messages in a batch for task queues, which take long for each of them."""


def benchmarks(
    *,
    batch: int = BATCH,
    timeline: Timeline | None = None,
    consumers: int = CONSUMERS,
    million: int = MILLION,
) -> list[Benchmark]:
    """All of the group; what counts as a million of pending messages can be less."""
    payload, few = Payload(batch=batch), Payload(batch=min(batch, _FEW))
    whole = timeline or Timeline()

    def suited(contestant: WorkQueue) -> Payload:
        return few if isinstance(contestant, TaskQueue) else payload

    beside: dict[str, list[Subject]] = {
        "enqueue_synced": [enqueueing(each, suited(each)) for each in enqueuers()],
        "lease_ack_batch1000": [leasing_batches(each, payload) for each in batchers()],
        "lease_ack_single": [leasing_singles(each, suited(each), consumers) for each in consumers_of_one()],
        "timeline": [keeping_time(each, suited(each), whole) for each in timekeepers()],
    }
    ours = leased_workloads.benchmarks(payload, timeline=whole, consumers=consumers)
    found = [
        benchmark._replace(subjects=[*benchmark.subjects, *map(_forgiven, beside[name])])
        for name, benchmark in ours.items()
    ]
    return [*found, *leased_pending.benchmarks(million)]


def _forgiven(subject: Subject) -> Subject:
    """Others may fail in ways of their own also while they are prepared, when very much is enqueued."""

    def prepare(place: str) -> None:
        try:
            if subject.prepare is not None:
                subject.prepare(place)
        except (Unavailable, WrongResult):
            raise
        except Exception as error:
            raise Unavailable(f"it failed: {error!r}") from error

    return broker.forgiven(subject)._replace(prepare=prepare)


# Each call makes nodes of its own: subjects of one benchmark may share a server, those of two do not.


def task_queues() -> Sequence[TaskQueue]:
    """Each with a server of its own."""
    return [Celery(CeleryNode()), Huey(HueyNode()), Procrastinate(ProcrastinateNode())]


def enqueuers() -> Sequence[WorkQueue]:
    """All that take messages."""
    servers = [RedisQueue(RedisNode()), RabbitQueue(RabbitNode(streams=False)), Postgres(PostgresNode())]
    return [*servers, NatsQueue(NatsNode()), *task_queues()]


def batchers() -> Sequence[WorkQueue]:
    """All that give many messages at once."""
    redis, postgres = RedisNode(), PostgresNode()
    servers = [RedisQueue(redis), RedisOverlapped(redis), RabbitQueue(RabbitNode(streams=False)), NatsQueue(NatsNode())]
    return [*servers, Postgres(postgres), PostgresTransaction(postgres)]


def consumers_of_one() -> Sequence[WorkQueue]:
    """All ways to get one message at a time."""
    rabbit, postgres = RabbitNode(streams=False), PostgresNode()
    return [
        RedisQueue(RedisNode()),
        RabbitQueue(rabbit),
        RabbitPrefetching(rabbit),
        Postgres(postgres),
        PostgresTransaction(postgres),
        NatsQueue(NatsNode()),
        *task_queues(),
    ]


def timekeepers() -> Sequence[WorkQueue]:
    """All that give a message when it is due."""
    return [RedisQueue(RedisNode()), Postgres(PostgresNode()), NatsQueue(NatsNode()), *task_queues()]
