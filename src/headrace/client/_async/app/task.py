"""Tasks: functions that are called by publishing a message, and whose results can be awaited."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from headrace.client._async.results.job_handle import AsyncJobHandle
from headrace.client.app.task_calls import encode_call
from headrace.client.producer.message_fields import PublishOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.client._async.bus import AsyncBus


class AsyncTaskCaller(Protocol):
    """Has the bus with which tasks are called: the app."""

    async def _publishing_bus(self) -> "AsyncBus":
        """The bus."""


class AsyncAppTask:
    """A function that workers call. Made by `@app.task(...)`; calling it directly runs it here.

    Example:
        >>> app = headrace.AsyncApp(bus)
        >>> @app.task("jobs")
        ... def add(one, other):
        ...     app.stop()
        ...     return one + other
        >>> handle = await add.delay(1, other=2)
        >>> await app.run(stop_on_signals=False)
        >>> await handle.result(timeout=10)
        3
    """

    def __init__(
        self,
        topic: str,
        name: str,
        function: "Callable[..., Any]",
        caller: AsyncTaskCaller,
    ) -> None:
        self.topic = topic
        self.name = name
        self._function = function
        self._caller = caller

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function here, as if it was no task."""
        return self._function(*args, **kwargs)

    async def delay(self, *args: Any, **kwargs: Any) -> AsyncJobHandle:
        """Let a worker call the function with these arguments, which JSON can hold.

        Parameters:
            args: the positional arguments.
            kwargs: the arguments by name.

        Returns:
            The handle that awaits what the function returns.

        Raises:
            CannotSerialize: if JSON cannot hold an argument.
            Timeout: if no receipt arrives in time; the job may still be published.

        Example:
            >>> app = headrace.AsyncApp(bus)
            >>> @app.task("jobs")
            ... def resize(name, width=640): ...
            >>> handle = await resize.delay("cat.jpg", width=320)
            >>> await handle.done()
            False
        """
        return await self.send(args, kwargs)

    async def send(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[PublishOptions]
    ) -> AsyncJobHandle:
        """Let a worker call the function, with options of the message.

        Parameters:
            args: the positional arguments.
            kwargs: the arguments by name.
            options: as for `bus.publish`: `key`, `headers`, `due`, `priority`, `expires` and others.

        Returns:
            The handle that awaits what the function returns.

        Raises:
            CannotSerialize: if JSON cannot hold an argument.
            InvalidArgument: if an option is wrong.
            Timeout: if no receipt arrives in time; the job may still be published.

        Example:
            >>> app = headrace.AsyncApp(bus)
            >>> @app.task("jobs")
            ... def resize(name, width=640): ...
            >>> handle = await resize.send(["cat.jpg"], {"width": 320}, key="cat.jpg")
            >>> handle.receipt.offset
            0
        """
        value = encode_call(self.name, args, kwargs or {})
        return await (await self._caller._publishing_bus()).publish(self.topic, value, reply=True, **options)
