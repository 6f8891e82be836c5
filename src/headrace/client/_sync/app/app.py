"""The app: runs handlers for messages and for schedules."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from headrace.client._sync.app.error_reporter import ErrorReporter
from headrace.client._sync.app.handler_workers import HandlerWorkers
from headrace.client._sync.app.task import AppTask
from headrace.client._sync.bus import Bus
from headrace.client._sync.concurrency import HandlerExecutor, Lock, Monitor, now, stopped_by_signals
from headrace.client._sync.connecting import connect
from headrace.client._sync.subjects.responder import Responder
from headrace.client.app.registration import (
    Registered,
    ServedSubject,
    handled_topics,
    registered,
    registered_schedule,
    served_subject,
)
from headrace.client.app.sink_delivery import SINK_SUBSCRIPTION, SinkDelivery
from headrace.client.app.task_calls import TaskDispatcher
from headrace.client.connection.addresses import default_address, parse_address, place_of
from headrace.client.producer.serializing import Deserializer
from headrace.model.arguments import checked_timeout
from headrace.model.errors import ConnectionFailed, HeadraceError, InvalidArgument
from headrace.model.representation import described, state_of
from headrace.model.subscription import DEFAULT_SUBSCRIPTION, SubscriptionSettings
from headrace.model.topic import checked_tenant_name

logger = logging.getLogger("headrace.client")

_CONNECT_TURN_S = 0.5
"""How long to try to connect before checking whether the app was stopped, in seconds."""

Handler = TypeVar("Handler", bound=Callable[..., Any])


class App:
    """Calls handlers with the messages of leased subscriptions, until it is stopped.

    The app acknowledges a message when its handler returns. If the handler raises, the app releases the message with
    the traceback; the broker delivers it again as the subscription's retry settings say, and in the end makes it a dead
    letter. `raise headrace.Reject(...)` makes a dead letter at once, `raise headrace.Retry(...)` sets the delay. While
    a handler runs, the app extends the lease of its message.

    Handlers do not create topics: one whose topic does not exist waits for it, and the app logs that once.

    Handlers may be plain functions or coroutine functions. With threads, coroutines run on one event loop in its own
    thread; with asyncio, plain functions run in threads. SystemExit, KeyboardInterrupt and other errors that are
    no Exception end the app.

    Parameters:
        bus: a bus, or a broker's address; by default $HEADRACE_URL, or else a broker on this machine.
        name: the name of the client in the broker's lists and logs, if the app makes the connection.
        wait: for how many seconds to retry if the broker cannot be reached yet, if the app makes the connection.
        service: the name under which the app registers as a service while it runs, with the topics and subjects of its
            handlers. It then reports their failures to the topic `headrace.errors`. By default it does neither.
        version: the version of the service.

    Example:
        >>> app = headrace.App(bus)
        >>> @app.on("jobs", concurrency=8)
        ... def work(job):
        ...     print(job.value)
        ...     app.stop()
        >>> receipt = bus.publish("jobs", b"resize cat.jpg")
        >>> app.run(stop_on_signals=False)
        b'resize cat.jpg'
    """

    def __init__(
        self,
        bus: Bus | str | None = None,
        *,
        name: str = "",
        wait: float = 30.0,
        service: str = "",
        version: str = "",
    ) -> None:
        self._bus = bus
        self._name = name
        self._service = checked_tenant_name(service, "service") if service else ""
        self._version = version
        self._wait = checked_timeout(wait, "wait")
        self._registered: list[Registered] = []
        self._tasks: dict[tuple[str, str], TaskDispatcher] = {}
        self._calling: Bus | None = None
        self._calling_lock = Lock()
        self._served: list[ServedSubject] = []
        self._monitor = Monitor()
        self._handlings: list[HandlerWorkers | Responder] = []
        self._running = False
        self._stopped = False
        self._fatal: BaseException | None = None

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        bus = self._bus
        yield repr(bus) if isinstance(bus, Bus) else place_of(parse_address(self._address()))
        yield f"handlers={len(self._registered) + len(self._served)}"
        yield state_of(stopping=self._running and self._stopped, running=self._running, not_running=True)

    def _address(self) -> Any:
        return self._bus or default_address()

    def on(
        self,
        topic: str | Sequence[str],
        *,
        concurrency: int = 1,
        subscription: str = DEFAULT_SUBSCRIPTION,
        retry: SubscriptionSettings | Mapping[str, Any] | None = None,
        lease: float | timedelta | None = None,
        deserializer: str | Deserializer | None = None,
        prefetch: int | None = None,
    ) -> Callable[[Handler], Handler]:
        """Register the decorated function as the handler of a topic's messages.

        Parameters:
            topic: the topic, or a list of topics.
            concurrency: how many messages of a topic are handled at once.
            subscription: the name of the leased subscription; created if it does not exist, with all messages.
            retry: settings that the subscription shall have, as SubscriptionSettings or by name, such as
                `{"deliveries_max": 5, "retry_seconds": 10}`; they are set when the app starts. By default they are left
                as they are.
            lease: for how many seconds a message is leased at a time; by default the subscription's setting. The lease
                is extended while the handler runs: this is how long others wait for the message when this process dies.
            deserializer: decodes values: `bytes` (the default: no decoding), `str`, `json`, or a callable.
            prefetch: how many messages are leased ahead; by default more when they are handled quickly, up to 1000.

        Returns:
            The decorator, which returns the function unchanged.

        Raises:
            InvalidArgument: if an argument is wrong, or the function cannot be called with a job.

        Example:
            >>> app = headrace.App(bus)
            >>> @app.on("jobs", concurrency=8, retry={"deliveries_max": 5}, deserializer="json")
            ... def work(job): ...
        """

        def register(handler: Handler) -> Handler:
            for name in handled_topics(topic):
                self._register(
                    registered(
                        handler,
                        name,
                        subscription=subscription,
                        concurrency=concurrency,
                        prefetch=prefetch,
                        retry=retry,
                        lease=lease,
                        deserializer=deserializer,
                    )
                )
            return handler

        return register

    def every(
        self,
        when: str,
        *,
        zone: str = "UTC",
        name: str | None = None,
        missed: str = "once",
        overlap: str = "skip",
        retry: SubscriptionSettings | Mapping[str, Any] | None = None,
        lease: float | timedelta | None = None,
    ) -> Callable[[Handler], Handler]:
        """Register the decorated function to run by a schedule; of several processes with the same app one runs it.

        The broker's schedule publishes to the topic `every.NAME`: a run that fails is retried like any other message.
        The function may take the job, or nothing.

        Parameters:
            when: a crontab expression, a nickname such as `@daily`, or an interval such as `every 90s`.
            zone: the time zone of the expression, such as `Europe/Berlin`.
            name: the name of the schedule; by default the function's.
            missed: for runs that were missed while the broker was down: `skip`, `once` or `all`.
            overlap: `skip`: no run while the last one is unfinished; or `allow`.
            retry: as for `on`.
            lease: as for `on`.

        Returns:
            The decorator, which returns the function unchanged.

        Raises:
            InvalidArgument: if the expression, the zone or another argument is wrong.

        Example:
            >>> app = headrace.App(bus)
            >>> @app.every("0 7 * * mon-fri", zone="Europe/Berlin")
            ... def wake(): ...
        """

        def register(handler: Handler) -> Handler:
            self._register(
                registered_schedule(
                    handler, when, zone=zone, name=name, missed=missed, overlap=overlap, retry=retry, lease=lease
                )
            )
            return handler

        return register

    def task(
        self,
        topic: str,
        *,
        name: str | None = None,
        concurrency: int = 1,
        subscription: str = DEFAULT_SUBSCRIPTION,
        retry: SubscriptionSettings | Mapping[str, Any] | None = None,
        lease: float | timedelta | None = None,
    ) -> Callable[[Callable[..., Any]], AppTask]:
        """Register the decorated function as a task, which others call with `delay` and whose result they can await.

        A topic can have several tasks; concurrency, retry and lease are those of the first.

        Parameters:
            topic: the topic to which calls are published.
            name: the name of the task in its messages; by default the function's.
            concurrency: as for `on`.
            subscription: as for `on`.
            retry: as for `on`.
            lease: as for `on`.

        Returns:
            The decorator, which returns the AppTask.

        Raises:
            InvalidArgument: if an argument is wrong, or the topic has a task of that name.

        Example:
            >>> app = headrace.App(bus)
            >>> @app.task("jobs", concurrency=8)
            ... def resize(name, width=640): ...
            >>> handle = resize.delay("cat.jpg", width=320)
        """

        def register(function: Callable[..., Any]) -> AppTask:
            dispatcher = self._tasks.get((topic, subscription))
            if dispatcher is None:
                dispatcher = TaskDispatcher()
                options: dict[str, Any] = {"concurrency": concurrency, "retry": retry, "lease": lease}
                self._register(registered(dispatcher, topic, subscription=subscription, **options))
                self._tasks[topic, subscription] = dispatcher
            called = name or function.__name__
            dispatcher.add(called, function)
            return AppTask(topic, called, function, self)

        return register

    def close(self) -> None:
        """Close the connection with which tasks are called, if the app has made one.

        Raises:
            Undelivered: if calls of tasks could not be published; the connection is closed all the same.

        Example:
            >>> app = headrace.App(bus)
            >>> app.close()
        """
        calling, self._calling = self._calling, None
        if calling is not None:
            calling.close()

    def _publishing_bus(self) -> Bus:
        """The bus with which tasks are called: the app's, or a connection of its own, made on first use."""
        if isinstance(self._bus, Bus):
            return self._bus
        with self._calling_lock:
            if self._calling is None:
                self._calling = connect(self._address(), name=self._name)
            return self._calling

    def deliver(
        self,
        topic: str,
        *,
        to: str,
        concurrency: int = 1,
        subscription: str = SINK_SUBSCRIPTION,
        retry: SubscriptionSettings | Mapping[str, Any] | None = None,
        lease: float | timedelta | None = None,
    ) -> None:
        """Deliver a topic's messages to a sink: a file, a web server, or what a plug-in adds.

        A message is acknowledged when the sink has taken it. Otherwise it is delivered again as the subscription's
        retry settings say, and in the end becomes a dead letter; one that the sink refuses for good does so at once.

        Parameters:
            topic: the topic.
            to: the URL of the sink: `file:///path` appends lines of JSON, `http://…` and `https://…` post JSON.
            concurrency: how many messages are delivered at once; with more than one their order is lost.
            subscription: the name of the leased subscription; created if it does not exist, with all messages.
            retry: as for `on`.
            lease: as for `on`.

        Raises:
            InvalidArgument: if no sink understands the URL, or another argument is wrong.
            PluginUnavailable: if the plug-in of the sink cannot be used.

        Example:
            >>> app = headrace.App(bus)
            >>> app.deliver("orders", to="file:///dev/null", retry={"deliveries_max": 5})
        """
        self._register(
            registered(
                SinkDelivery(to),
                topic,
                subscription=subscription,
                concurrency=concurrency,
                retry=retry,
                lease=lease,
            )
        )

    def serves(
        self, subject: str, *, concurrency: int = 1, deserializer: str | Deserializer | None = None
    ) -> Callable[[Handler], Handler]:
        """Register the decorated function as the handler of requests to a subject.

        It gets each request as an IncomingRequest with `value`, `headers` and `subject`. What it returns is the reply:
        bytes, text, None for no value, something that JSON can express, or a `headrace.Reply` with headers. If it
        raises, the caller gets ServiceFailed with the error's code and text, never with the traceback, which is
        logged here. All who serve a subject share its requests.

        Parameters:
            subject: the subject, such as `price.quote`; or a pattern: `*` stands for one token, `#` for any number,
                `>` at the end for one or more.
            concurrency: how many requests are handled at once; the broker holds others back, or gives them to others.
            deserializer: decodes values: `bytes` (the default: no decoding), `str`, `json`, or a callable.

        Returns:
            The decorator, which returns the function unchanged.

        Raises:
            InvalidArgument: if an argument is wrong, or the function cannot be called with a request.

        Example:
            >>> app = headrace.App(bus)
            >>> @app.serves("price.quote", concurrency=8, deserializer="json")
            ... def quote(request):
            ...     return {"item": request.value["item"], "price": 3.5}
        """

        def register(handler: Handler) -> Handler:
            if self._running:
                raise InvalidArgument("the app is running; register handlers before run()")
            self._served.append(served_subject(handler, subject, concurrency=concurrency, deserializer=deserializer))
            return handler

        return register

    def run(self, *, stop_on_signals: bool = True) -> None:
        """Call the handlers, until `stop()` is called, or SIGTERM or SIGINT arrives.

        At the end it finishes the messages in progress, and releases those that were not begun. A second signal ends
        the process at once, with exit code 128 + its number; the leases of messages in progress then expire.

        Parameters:
            stop_on_signals: let SIGTERM and SIGINT stop it; they do so only in a program's main thread.

        Raises:
            ConnectionFailed: if the broker cannot be reached when the app starts.
            InvalidArgument: if no handler is registered.

        Example:
            >>> app = headrace.App(bus)
            >>> @app.on("jobs")
            ... def work(job):
            ...     print(job.value)
            ...     app.stop()
            >>> receipt = bus.publish("jobs", b"resize cat.jpg")
            >>> app.run(stop_on_signals=False)
            b'resize cat.jpg'
        """
        if self._running:
            raise InvalidArgument("the app is running")
        signals = stop_on_signals and threading.current_thread() is threading.main_thread()
        self._running, self._fatal = True, None
        try:
            with stopped_by_signals(self.stop) if signals else contextlib.nullcontext():
                self._run()
        finally:
            self._running = self._stopped = False
        if self._fatal is not None:
            raise self._fatal

    def stop(self) -> None:
        """Let `run` end, even if it has not begun; any thread may call it.

        Example:
            >>> app = headrace.App(bus)
            >>> @app.on("jobs")
            ... def work(job): ...
            >>> app.stop()
            >>> app.run(stop_on_signals=False)
        """
        with self._monitor.guard:
            self._stopped = True
            for handling in self._handlings:
                handling.stop()
            self._monitor.notify()

    def _run(self) -> None:
        if isinstance(self._bus, Bus):
            self._work(self._bus)
            return
        bus = self._connected()
        if bus is not None:
            with bus:
                self._work(bus)

    def _connected(self) -> Bus | None:
        """Connect, in short attempts; returns None if the app is stopped before."""
        deadline = now() + self._wait
        while not self._stopped:
            try:
                wait = max(0.0, min(deadline - now(), _CONNECT_TURN_S))
                return connect(self._address(), name=self._name, wait=wait)
            except ConnectionFailed:
                if now() >= deadline:
                    raise
        return None

    def _work(self, bus: Bus) -> None:
        threads_max = sum(each.concurrency for each in self._registered) + sum(
            each.concurrency for each in self._served
        )
        executor = HandlerExecutor(threads_max)
        missing: set[str] = set()  # topics that handlers wait for, each logged once
        try:
            reporter = self._register_service(bus) if self._service else None
            for wanted in self._registered:
                if isinstance(wanted.handler, SinkDelivery):
                    wanted.handler.open()
                handling = HandlerWorkers(bus, wanted, executor, self._failed, missing, reporter)
                self._handlings.append(handling)
                handling.begin()
            for served in self._served:
                responder = Responder(bus, served, executor, self._failed, reporter)
                self._handlings.append(responder)
                responder.begin()
            with self._monitor.guard:
                while not self._stopped:
                    self._monitor.wait()
        finally:
            self.stop()
            while self._handlings:
                self._handlings.pop().close()
            executor.close()
            for wanted in self._registered:
                if isinstance(wanted.handler, SinkDelivery):
                    wanted.handler.close()
            if self._service:
                self._deregister_service(bus)

    def _register_service(self, bus: Bus) -> ErrorReporter:
        """Register the app as a service, before its handlers use the bus."""
        topics = sorted({wanted.topic for wanted in self._registered})
        subjects = sorted({served.subject for served in self._served})
        instance = bus.services.register(self._service, version=self._version, consumes=topics, serves=subjects)
        return ErrorReporter(bus._broker, self._service, instance)

    def _deregister_service(self, bus: Bus) -> None:
        try:
            bus.services.deregister(self._service)
        except HeadraceError as error:
            logger.warning("service not deregistered; it expires  service=%s error=%s", self._service, error)

    def _register(self, wanted: Registered) -> None:
        if self._running:
            raise InvalidArgument("the app is running; register handlers before run()")
        if any((each.topic, each.subscription) == (wanted.topic, wanted.subscription) for each in self._registered):
            raise InvalidArgument(f"{wanted.topic} has a handler: use another subscription for a second one")
        self._registered.append(wanted)

    def _failed(self, error: BaseException) -> None:
        """End the app because of an error that no message caused."""
        self._fatal = self._fatal or error
        logger.error("app stopped by an error  error=%r", error)
        self.stop()
