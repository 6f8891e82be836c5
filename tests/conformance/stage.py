"""Short ways to say what the suites of leasing say often."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.conformance.faces import Awaitable as SyncFace

from headrace.client._async.app.app import AsyncApp
from headrace.client._sync.app.app import App

Story = Callable[[Any], Awaitable[None]]
Run = Callable[[Story], None]


def threaded(bus: Any) -> bool:
    """Whether the bus has the face for threads."""
    return isinstance(bus, SyncFace)


async def published(bus: Any, topic: str, *values: bytes, **fields: Any) -> None:
    """Publish these values, all with the same fields."""
    await bus.publish_many(topic, values, **{name: [field] * len(values) for name, field in fields.items()})


def values(jobs: list[Any]) -> list[Any]:
    """What the messages say."""
    return [job.value for job in jobs]


@asynccontextmanager
async def running(bus: Any, prepare: Callable[[Any], None], **options: Any) -> AsyncIterator["Running"]:
    """An app at work, for the face that the bus has; handlers are plain functions, which both take."""
    if threaded(bus):
        app: Any = App(bus.inner, **options)
        prepare(app)
        ended = asyncio.create_task(asyncio.to_thread(app.run))
        await asyncio.sleep(0)  # else it would not begin before a call that blocks
    else:
        app = AsyncApp(bus, **options)
        prepare(app)
        ended = asyncio.create_task(app.run(stop_on_signals=False))
    try:
        yield Running(app, ended)
    finally:
        app.stop()
        await asyncio.wait_for(ended, 20)


class Running:
    """An app at work."""

    def __init__(self, app: Any, ended: "asyncio.Task[None]") -> None:
        self.app = app
        self._ended = ended

    async def until(self, done: Callable[[], Any]) -> None:
        """Wait until something is the case, or the app has ended before its time."""
        while not self._ended.done():
            found = done()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.005)

    async def ended(self) -> None:
        """Wait for the end."""
        await asyncio.wait([self._ended])
