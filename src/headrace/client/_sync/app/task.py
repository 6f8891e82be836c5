"""Tasks: functions that are called by publishing a message, and whose results can be awaited."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from headrace.client._sync.results.job_handle import JobHandle
from headrace.client.app.task_calls import encode_call
from headrace.client.producer.message_fields import PublishOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.client._sync.bus import Bus


class TaskCaller(Protocol):
    """Has the bus with which tasks are called: the app."""

    def _publishing_bus(self) -> "Bus":
        """The bus."""


class AppTask:
    """A function that workers call. Made by `@app.task(...)`; calling it directly runs it here.

    Example:
        >>> app = headrace.App(bus)
        >>> @app.task("jobs")
        ... def add(one, other):
        ...     app.stop()
        ...     return one + other
        >>> handle = add.delay(1, other=2)
        >>> app.run(stop_on_signals=False)
        >>> handle.result(timeout=10)
        3
    """

    def __init__(
        self,
        topic: str,
        name: str,
        function: "Callable[..., Any]",
        caller: TaskCaller,
    ) -> None:
        self.topic = topic
        self.name = name
        self._function = function
        self._caller = caller

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function here, as if it was no task."""
        return self._function(*args, **kwargs)

    def delay(self, *args: Any, **kwargs: Any) -> JobHandle:
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
            >>> app = headrace.App(bus)
            >>> @app.task("jobs")
            ... def resize(name, width=640): ...
            >>> handle = resize.delay("cat.jpg", width=320)
            >>> handle.done()
            False
        """
        return self.send(args, kwargs)

    def send(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[PublishOptions]
    ) -> JobHandle:
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
            >>> app = headrace.App(bus)
            >>> @app.task("jobs")
            ... def resize(name, width=640): ...
            >>> handle = resize.send(["cat.jpg"], {"width": 320}, key="cat.jpg")
            >>> handle.receipt.offset
            0
        """
        value = encode_call(self.name, args, kwargs or {})
        return (self._caller._publishing_bus()).publish(self.topic, value, reply=True, **options)
