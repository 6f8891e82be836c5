"""The inside of a bus: its connections and parts, from the first request to the last."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from headrace.client._async.admin.service_registrations import AsyncServiceRegistrations
from headrace.client._async.concurrency import Lock, Timers, now, run_blocking, run_detached
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client._async.consumer.subscription import AsyncSubscription
from headrace.client._async.leasing.acknowledger import AsyncAcknowledger
from headrace.client._async.leasing.jobs import AsyncJobs
from headrace.client._async.leasing.lease_requester import AsyncLeaseRequester
from headrace.client._async.producer.accumulator import AsyncAccumulator
from headrace.client._async.producer.metadata_cache import AsyncMetadataCache
from headrace.client._async.producer.multicast import AsyncMulticast
from headrace.client._async.producer.producer import AsyncProducer
from headrace.client._async.results.job_publisher import AsyncJobPublisher
from headrace.client._async.subjects.live_subscription import AsyncLiveSubscription
from headrace.client._async.subjects.requester import AsyncRequester
from headrace.client.connection.addresses import Target, place_of
from headrace.client.connection.clock import Clock
from headrace.client.connection.endpoints import Endpoints
from headrace.client.connection.identity import default_name
from headrace.client.connection.token_source import TokenSource
from headrace.client.connection.weak_registry import WeakRegistry
from headrace.client.producer.message_fields import MessageFields, TopicList
from headrace.client.results import Receipt
from headrace.client.times import check_name
from headrace.model.arguments import checked_timeout, shown
from headrace.model.errors import Closed, HeadraceError, InvalidArgument
from headrace.model.representation import described, short, state_of
from headrace.model.topic import DEFAULT_TENANT
from headrace.wire.frames import Memory
from headrace.wire.native import Hello


class AsyncBusParts(ABC):
    """What a bus has besides its public methods; `AsyncBus` creates the parts."""

    _closed: bool
    _target: Target
    _endpoints: Endpoints
    _given_name: str
    _hello: Hello
    _token: TokenSource
    _memory: Memory | None
    _timeout: float
    _timers: Timers
    _clock: Clock
    _broker: AsyncReconnectingConnection
    _registrations: AsyncServiceRegistrations
    _metadata_cache: AsyncMetadataCache
    _jobs: AsyncJobPublisher
    _requester: AsyncRequester
    _producers: WeakRegistry[AsyncAccumulator]
    _on_close: Callable[[], None] | None
    _consuming: AsyncReconnectingConnection | None
    _consuming_lock: Lock
    _receiving: WeakRegistry[AsyncSubscription | AsyncJobs | AsyncLiveSubscription]
    _own_producer: AsyncProducer | None
    _multicast: AsyncMulticast | None = None
    _leasing: dict[tuple[str, str], tuple[AsyncAcknowledger, AsyncLeaseRequester]]

    @property
    @abstractmethod
    def tenant(self) -> str:
        """The tenant whose names the bus's names are."""

    @abstractmethod
    def producer(self, topic: str | None = None, *, linger: float = 0.005) -> AsyncProducer:
        """Create a producer."""

    @abstractmethod
    async def close(self) -> None:
        """Close all parts, and then the connections."""

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the bus is closed")

    async def _connect(self, wait: float = 0.0) -> None:
        """Make the first connection; `headrace.connect_async` has done it."""
        try:
            await self._broker.connect(checked_timeout(wait, "wait"))
        except BaseException:
            await self.close()
            raise

    async def _consuming_line(self) -> AsyncReconnectingConnection:
        """The connection for deliveries, made now if there is none."""
        deadline = now() + self._timeout
        async with self._consuming_lock:
            self._check_open()
            self._broker.check_open()
            if self._consuming is None:
                broker = AsyncReconnectingConnection(
                    self._endpoints, self._hello, self._timeout, self._timers, self._memory, self._clock, self._token
                )
                await broker.connect(deadline - now())  # the broker may just be starting again
                self._registrations.attach(broker)
                self._consuming = broker
            return self._consuming

    def _keep(self, part: AsyncSubscription | AsyncJobs | AsyncLiveSubscription) -> None:
        """Close this one with the bus."""
        self._receiving.add(part)

    def _forget(self, part: AsyncSubscription | AsyncJobs | AsyncLiveSubscription) -> None:
        """This one is closed."""
        self._receiving.discard(part)

    def _disown(self) -> None:
        """In a forked child: begin anew, and leave to the parent what is under way."""
        self._hello.name = self._given_name or default_name()
        self._timers.disown()
        self._clock.in_use = False
        self._broker.disown()
        self._registrations.disown()
        self._metadata_cache.disown()
        self._jobs.disown()
        self._requester.disown()
        if self._consuming is not None:
            self._consuming.disown()
        self._consuming, self._consuming_lock = None, Lock()
        for part in self._receiving.alive():
            part._disown()
        for accumulator in self._producers.alive():
            accumulator.disown()
        for acknowledger, lease_requester in self._leasing.values():
            acknowledger.disown()
            lease_requester.disown()

    async def _close_lines(self, lines: list[AsyncReconnectingConnection]) -> None:
        for broker in lines:  # all of them before anything is waited for
            broker.end()
        try:
            for broker in lines:
                await broker.close()
            self._timers.close()
        finally:
            if self._on_close is not None:
                await run_blocking(self._on_close)

    async def _close_parts(self, began: float) -> HeadraceError | None:
        """Let all parts finish, at the same time; returns what the first has failed with."""
        failed: HeadraceError | None = None
        for accumulator in self._producers.alive():
            accumulator.send_open_batches()
        for part in self._receiving.alive():
            try:
                await part._close_by(began + self._timeout)
            except HeadraceError as error:
                failed = failed or error
        for accumulator in self._producers.alive():
            try:
                await accumulator.close_since(began)
            except HeadraceError as error:
                failed = failed or error
        for acknowledger, _ in self._leasing.values():
            await acknowledger.answered(began + self._timeout - now())
        await self._requester.close(began + self._timeout - now())
        return failed

    def _abandon_parts(self) -> None:
        for part in self._receiving.alive():
            part._abandon()
        for accumulator in self._producers.alive():
            accumulator.abandon()
        for acknowledger, _ in self._leasing.values():
            acknowledger.close()
        self._registrations.end()

    def _abandon(self) -> None:
        """Close without waiting for the broker."""
        self._abandon_parts()
        for broker in (self._consuming, self._broker):
            if broker is not None:
                broker.end()
        self._timers.close()
        if self._on_close is not None:
            run_detached(self._on_close)

    def _begin_producer(self) -> AsyncProducer:
        """Make the producer with which the bus itself publishes: it sends at once."""
        self._own_producer = self.producer(linger=0)
        self._own_producer._accumulator.bus = None  # the bus keeps the producer alive, and not the other way round
        return self._own_producer

    async def _publish_to_all(
        self, topics: TopicList, value: bytes | None, key: bytes | str | None, expects: bool, fields: MessageFields
    ) -> list[Receipt]:
        """Publish a message to several topics, together or not at all."""
        self._check_open()
        if expects:
            raise InvalidArgument("for several topics nothing can be expected, and no reply; use a transaction")
        if not isinstance(topics, list | tuple):
            raise InvalidArgument(f"a topic is named by text, and several by a list, not {shown(topics)}")
        if self._multicast is None:
            self._multicast = AsyncMulticast(self._broker, self._metadata_cache, self.tenant, self)
        return await self._multicast.publish(topics, value, key, max(self._timeout, 1.0), fields)

    def _shared_leasing(self, topic: str, subscription: str) -> tuple[AsyncAcknowledger, AsyncLeaseRequester]:
        """What all users of a leased subscription share."""
        check_name(topic, "a topic")
        check_name(subscription, "a subscription")
        shared = self._leasing.get((topic, subscription))
        if shared is None:
            acknowledger = AsyncAcknowledger(self._broker, self._timers, self._clock, topic, subscription)
            shared = self._leasing.setdefault(
                (topic, subscription), (acknowledger, AsyncLeaseRequester(self, acknowledger))
            )
        return shared

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield place_of(self._target)
        yield f"name={short(self._hello.name)}"
        if self.tenant != DEFAULT_TENANT:
            yield f"tenant={self.tenant}"
        yield state_of(closed=self._closed, connected=self._broker.connected, not_connected=True)

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True):
            self._closed = True
            self._timers.aside(self._abandon)
            warnings.warn(f"a bus was not closed: {self!r}", ResourceWarning, stacklevel=2, source=self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
