"""One way to write tests for both faces of the client: the sync one, made to look like the async one."""

import inspect
from collections.abc import AsyncIterator
from typing import Any

from headrace.client._async.admin.events import AsyncEventFeed
from headrace.client._async.admin.log_levels import AsyncLogLevelAdmin
from headrace.client._async.admin.routes import AsyncRoutes
from headrace.client._async.admin.services import AsyncServices
from headrace.client._async.admin.webhooks import AsyncWebhooks
from headrace.client._async.bus import AsyncBus
from headrace.client._async.consumer.subscription import AsyncSubscription
from headrace.client._async.leasing.jobs import AsyncJobs
from headrace.client._async.leasing.leased_block import AsyncLeasedBlock
from headrace.client._async.leasing.queue import AsyncQueue
from headrace.client._async.leasing.scheduled import AsyncScheduled
from headrace.client._async.producer.producer import AsyncProducer
from headrace.client._async.producer.sent import AsyncSent, AsyncSentMany
from headrace.client._async.producer.transaction import AsyncTransaction
from headrace.client._async.results.job_handle import AsyncJobHandle
from headrace.client._async.subjects.live_subscription import AsyncLiveSubscription
from headrace.client._async.subjects.subjects import AsyncSubjects
from headrace.client._sync.admin.events import EventFeed
from headrace.client._sync.admin.log_levels import LogLevelAdmin
from headrace.client._sync.admin.routes import Routes
from headrace.client._sync.admin.services import Services
from headrace.client._sync.admin.webhooks import Webhooks
from headrace.client._sync.bus import Bus
from headrace.client._sync.consumer.subscription import Subscription
from headrace.client._sync.leasing.jobs import Jobs
from headrace.client._sync.leasing.leased_block import LeasedBlock
from headrace.client._sync.leasing.queue import Queue
from headrace.client._sync.leasing.scheduled import Scheduled
from headrace.client._sync.producer.producer import Producer
from headrace.client._sync.producer.sent import Sent, SentMany
from headrace.client._sync.producer.transaction import Transaction
from headrace.client._sync.results.job_handle import JobHandle
from headrace.client._sync.subjects.live_subscription import LiveSubscription
from headrace.client._sync.subjects.subjects import Subjects

TWINS: dict[type, type] = {
    Bus: AsyncBus,
    EventFeed: AsyncEventFeed,
    JobHandle: AsyncJobHandle,
    Jobs: AsyncJobs,
    LeasedBlock: AsyncLeasedBlock,
    LiveSubscription: AsyncLiveSubscription,
    LogLevelAdmin: AsyncLogLevelAdmin,
    Producer: AsyncProducer,
    Queue: AsyncQueue,
    Routes: AsyncRoutes,
    Webhooks: AsyncWebhooks,
    Scheduled: AsyncScheduled,
    Sent: AsyncSent,
    SentMany: AsyncSentMany,
    Subjects: AsyncSubjects,
    Services: AsyncServices,
    Subscription: AsyncSubscription,
    Transaction: AsyncTransaction,
}


class Awaitable:
    """A sync object that is used as its async twin: what is a coroutine there can be awaited here."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        theirs = getattr(TWINS[type(self.inner)], name, None)
        mine = getattr(self.inner, name)
        if inspect.isasyncgenfunction(theirs):
            return lambda *args, **named: _iterated(mine(*args, **named))
        if inspect.iscoroutinefunction(theirs):

            async def call(*args: Any, **named: Any) -> Any:
                return awaitable(mine(*_bare(args), **named))

            return call
        if inspect.isfunction(theirs):
            return lambda *args, **named: awaitable(mine(*_bare(args), **named))
        return awaitable(mine)

    def __aiter__(self) -> AsyncIterator[Any]:
        return _iterated(self.inner)

    def __await__(self) -> Any:
        async def result() -> Any:
            return self.inner.result()

        return result().__await__()

    async def __aenter__(self) -> Any:
        return awaitable(self.inner.__enter__())

    async def __aexit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)


def awaitable(inner: Any) -> Any:
    """The object as its async twin, if it has one."""
    return Awaitable(inner) if type(inner) in TWINS else inner


def _bare(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.inner if isinstance(arg, Awaitable) else arg for arg in args)


async def _iterated(iterable: Any) -> AsyncIterator[Any]:
    for item in iterable:
        yield item
