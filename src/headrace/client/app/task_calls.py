"""Calls of tasks as messages: a name and arguments in JSON."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.client.app.handler_results import Reject
from headrace.client.leasing.jobs import Job
from headrace.client.producer.serializing import CannotSerialize
from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument


class TaskCall(msgspec.Struct, omit_defaults=True):
    """What a message of a task says."""

    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(TaskCall)


def encode_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The message that calls a task; raises CannotSerialize if JSON cannot hold an argument."""
    try:
        return msgspec.json.encode(TaskCall(name, list(args), dict(kwargs)))
    except Exception as error:
        raise CannotSerialize(f"JSON cannot hold the arguments of the task {name}: {shown(error)}") from error


class TaskDispatcher:
    """The handler of a topic with tasks: calls the function that a message names."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Register a function under the name of a task."""
        if name in self._functions:
            raise InvalidArgument(f"there is a task {name}: give this one another name=")
        self._functions[name] = function

    def __call__(self, job: Job) -> Any:
        """Call the function that a message names; a message that names none becomes a dead letter."""
        try:
            call = _decoder.decode(job.value or b"")
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Reject(f"the message calls no task: {error}") from error
        function = self._functions.get(call.task)
        if function is None:
            raise Reject(f"there is no task {call.task!r} here; there are {', '.join(sorted(self._functions))}")
        return function(*call.args, **call.kwargs)
