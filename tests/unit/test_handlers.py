"""Handlers are checked when they are registered, so that none is acknowledged without having run."""

import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import headrace
from headrace.client.app.handlers import check_returned, checked_handler, is_coroutine_function
from headrace.model.errors import InvalidArgument


class Callable_:
    """An object that can be called."""

    async def __call__(self, job: Any) -> None:
        """Handle a message."""


async def handle_nothing() -> None:
    """Take no message."""


def pair(job: Any, other: Any) -> None:
    """Take too much."""


def named(*, job: Any) -> None:
    """Take the message only by name."""


def yields(job: Any) -> Iterator[Any]:
    """Do nothing when it is called."""
    yield job


async def yields_later(job: Any) -> AsyncIterator[Any]:
    """Do nothing when it is called."""
    yield job


class Service:
    """Has a method that looks like a handler."""

    def handle(self, job: Any) -> None:
        """Handle a message."""


@pytest.mark.parametrize("handler", [pair, named, yields, yields_later, Service.handle, Service, "resize", None, 3])
@pytest.mark.parametrize("app", [headrace.App(), headrace.AsyncApp()], ids=["App", "AsyncApp"])
def test_what_would_not_run_is_refused(app: Any, handler: Any) -> None:
    for register in (app.on("jobs"), app.every("@daily", name="nightly")):
        with pytest.raises(InvalidArgument, match="handler"):
            register(handler)


def test_what_takes_a_message_or_nothing_is_accepted() -> None:
    seen: list[Any] = []
    checked_handler(seen.append)("built in")
    checked_handler(lambda: seen.append("nothing"))("message")
    checked_handler(lambda job=None: seen.append(job))("default")
    checked_handler(functools.partial(pair, other=1))
    checked_handler(Service().handle)
    assert seen == ["built in", "nothing", "default"]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (handle_nothing, True),
        (checked_handler(handle_nothing), True),
        (Callable_(), True),
        (functools.partial(Callable_().__call__), True),
        (print, False),
        (Service().handle, False),
    ],
)
def test_coroutine_functions_are_recognised(handler: Callable[..., Any], expected: bool) -> None:
    assert is_coroutine_function(handler) is expected


def test_a_generator_that_a_handler_returns_has_not_run() -> None:
    with pytest.raises(InvalidArgument, match="generator"):
        check_returned(yields(1))


@pytest.mark.parametrize("app", [headrace.App(), headrace.AsyncApp()], ids=["App", "AsyncApp"])
def test_the_decorators_say_what_they_expect(app: Any) -> None:
    with pytest.raises(InvalidArgument, match=r'@app.on\("jobs"\)'):
        app.on(handle_nothing)(handle_nothing)
    for topic in ("", "a/b/c", "with, comma"):
        with pytest.raises(InvalidArgument, match="cannot name a"):
            app.on(topic)(handle_nothing)
    for wrong in ({"concurrency": 0}, {"concurrency": 1.5}, {"prefetch": "many"}, {"subscription": "a,b"}):
        with pytest.raises(InvalidArgument):
            app.on("jobs", **wrong)(handle_nothing)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"when": 60}, "every 60s"),
        ({"when": "every blue moon"}, "every"),
        ({"when": "61 * * * *"}, "61"),
        ({"when": "@daily", "zone": "Europe/Atlantis"}, "Europe/Berlin"),
        ({"when": "@daily", "zone": 1}, "Europe/Berlin"),
        ({"when": "@daily", "missed": "twice"}, "missed"),
        ({"when": "@daily", "overlap": "never"}, "overlap"),
        ({"when": "@daily", "name": 7}, "nightly-report"),
    ],
)
@pytest.mark.parametrize("app", [headrace.App(), headrace.AsyncApp()], ids=["App", "AsyncApp"])
def test_schedules_are_checked_when_they_are_registered(app: Any, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        app.every(**wrong)(handle_nothing)


def test_a_retry_is_checked_when_it_is_made() -> None:
    with pytest.raises(InvalidArgument, match="not both"):
        headrace.Retry(1, until=5)
    with pytest.raises(InvalidArgument, match="state"):
        headrace.Retry(state=b"x" * 100_000)


def test_a_schedule_needs_a_name() -> None:
    with pytest.raises(InvalidArgument, match="name"):
        headrace.App().every("@daily")(lambda: None)


def test_an_app_that_is_stopped_while_it_connects_ends() -> None:
    app = headrace.App("headrace://127.0.0.1:1", wait=600)
    app.on("jobs")(lambda: None)
    running = threading.Thread(target=app.run)
    running.start()
    app.stop()
    running.join(60)
    assert not running.is_alive()


def test_an_app_that_cannot_connect_says_so_in_the_end() -> None:
    app = headrace.App("headrace://127.0.0.1:1", wait=0.7)
    app.on("jobs")(lambda: None)
    with pytest.raises(headrace.errors.ConnectionFailed, match="headrace serve"):
        app.run()
