"""The bus: what a program has of a broker."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

from headrace.client._sync.concurrency import Lock, Timers, now, run_blocking, run_detached
from headrace.client._sync.connection.connection import receive_memory
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client._sync.consumer.subscription import Subscription
from headrace.client._sync.leasing.acknowledger import Acknowledger
from headrace.client._sync.leasing.jobs import Jobs
from headrace.client._sync.leasing.lease_requester import LeaseRequester
from headrace.client._sync.leasing.leased_block import LeasedBlock
from headrace.client._sync.leasing.queue import Queue
from headrace.client._sync.producer.metadata_cache import MetadataCache
from headrace.client._sync.producer.publishing import Publishing
from headrace.client.connection import fork_guard
from headrace.client.connection.addresses import Nearby, Target, default_address, parse_address, place_of
from headrace.client.connection.clock import Clock
from headrace.client.connection.identity import checked_client_name, default_name
from headrace.client.connection.weak_registry import WeakRegistry
from headrace.client.consumer.partition_reader import OnCorrupt
from headrace.client.producer.serializing import Deserializer
from headrace.client.times import Start, check_name, listed
from headrace.model.arguments import checked_timeout
from headrace.model.errors import HeadraceError
from headrace.model.representation import described, short, state_of
from headrace.model.subscription import DEFAULT_SUBSCRIPTION
from headrace.wire.native import Hello


class Bus(Publishing):
    """A program's way to a broker; made by `headrace.connect` or `headrace.open`. Close it, or use `with`.

    It keeps two connections: one for requests and producers, and one, made with the first subscription or lease, on
    which messages are delivered, so that a flood of deliveries keeps no receipt waiting. Both are made again by
    themselves when they break; requests that can be repeated without harm are, for as long as `timeout`.
    """

    def __init__(self, target: Target, name: str, timeout: float, on_close: Callable[[], None] | None) -> None:
        self._closed = True  # until all is well
        timeout = checked_timeout(timeout, least=0.001)
        timers, clock = Timers(), Clock()
        self._target = target
        self._given_name = checked_client_name(name)
        self._hello = Hello(client="headrace-python", name=self._given_name or default_name())
        self._memory = receive_memory()
        broker = ReconnectingConnection(target, self._hello, timeout, timers, self._memory, clock)
        super().__init__(broker, MetadataCache(broker), timers, clock, timeout)
        self._on_close = on_close
        self._consuming: ReconnectingConnection | None = None
        self._consuming_lock = Lock()
        self._receiving: WeakRegistry[Subscription | Jobs] = WeakRegistry()
        self._leasing: dict[tuple[str, str], tuple[Acknowledger, LeaseRequester]] = {}
        fork_guard.register(self)

    @property
    def name(self) -> str:
        """What the broker calls this client in its lists and logs; made of host and process if none was given."""
        return self._hello.name

    # Receiving.

    def subscribe(
        self,
        *topics: str,
        group: str | None = None,
        pattern: str | Sequence[str] | None = None,
        start: Start | Mapping[int, int] = "earliest",
        partitions: Sequence[int] | None = None,
        commit: Literal["auto", "manual"] = "auto",
        commit_interval: float = 1.0,
        deserializer: str | Deserializer | None = None,
        on_error: Literal["raise", "skip"] | Callable[[Any], Any] = "raise",
        on_out_of_range: Literal["earliest", "latest", "raise"] = "earliest",
        on_corrupt: OnCorrupt = "raise",
        timeout: float | None = None,
        session_timeout: float = 10.0,
        prefetch_bytes: int = 8 << 20,
        create: bool = False,
    ) -> Subscription:
        """Receive messages; begins when it is iterated, or entered with `with`.

        A topic that does not exist then raises TopicNotFound, which names those that may have been meant.

        With a group, its members share the partitions, and the group's positions are kept by the broker. Without
        one, this subscription reads by itself from `start`, and nothing is kept.

        Parameters:
            topics: what to receive.
            group: the group to take part in.
            pattern: topics by pattern, besides those named: `*` stands for any characters, `?` for one. New topics
                that match are found within seconds.
            start: where to begin: `earliest`, `latest`, a datetime, or an offset; or partitions to offsets. With a
                group, where a group begins that has no position yet (no offsets then).
            partitions: only these, without a group.
            commit: `auto`: a message counts as processed when the next one is asked for, and positions are committed
                every `commit_interval` seconds, when partitions go to other members, and at the end. `manual`: only
                `commit()` does.
            commit_interval: see there.
            deserializer: what makes bytes into values: `bytes` (the default: none), `str`, `json`, or a callable.
            on_error: what happens to a message that cannot be deserialized: `raise` CannotDeserialize, which has the
                message, and go on behind it when iterated again; `skip` it, with a warning logged; or a callable that
                gets the error and returns a value in its place.
            on_out_of_range: where to go on when messages to be read have been removed: `earliest` or `latest`, with a
                warning logged, or `raise` OffsetOutOfRange.
            on_corrupt: what happens when stored messages are damaged: `raise` CorruptBatch, which has their offsets,
                and go on behind them when iterated again; `skip` them, with a warning logged; or a callable that gets
                a DamagedRange, and skips them by returning.
            timeout: iteration ends when no message has come for so many seconds; by default never.
            session_timeout: after so many seconds out of touch a member's partitions go to others.
            prefetch_bytes: how much is received ahead of what is being processed, for all partitions together, but
                64 KiB for each at least.
            create: make topics that do not exist, if the broker may make topics by itself (`auto_create_topics`).
        """
        self._check_open()
        subscription = Subscription(
            self,
            topics,
            group=group,
            patterns=[pattern] if isinstance(pattern, str) else listed(pattern or (), "patterns"),
            start=start,
            partitions=None if partitions is None else listed(partitions, "partitions"),
            commit=commit,
            commit_interval=commit_interval,
            deserializer=deserializer,
            on_error=on_error,
            on_out_of_range=on_out_of_range,
            on_corrupt=on_corrupt,
            timeout=timeout,
            session_timeout=session_timeout,
            prefetch_bytes=prefetch_bytes,
            create=create,
        )
        self._keep(subscription)
        return subscription

    def queue(
        self,
        topic: str,
        subscription: str = DEFAULT_SUBSCRIPTION,
        *,
        deserializer: str | Deserializer | None = None,
        create: bool = False,
    ) -> Queue:
        """A leased subscription of a topic, from which messages are taken one by one; nothing is asked yet.

        Parameters:
            topic: whose messages. If it does not exist, what is asked of the queue raises TopicNotFound.
            subscription: which; made with the first lease if there is none of that name, with all messages.
            deserializer: what makes bytes into values: `bytes` (the default: none), `str`, `json`, or a callable.
            create: make the topic with the first lease if it does not exist and the broker may make topics by itself
                (`auto_create_topics`).
        """
        self._check_open()
        acknowledger, lease_requester = self._shared_leasing(topic, subscription)
        return Queue(self, self._broker, acknowledger, lease_requester, deserializer, create)

    def lease(
        self,
        topic: str,
        max: int = 10,
        *,
        subscription: str = DEFAULT_SUBSCRIPTION,
        lease: float | timedelta | None = None,
        wait: float | timedelta = 0.0,
        deserializer: str | Deserializer | None = None,
        create: bool = False,
    ) -> LeasedBlock:
        """Messages for the time of a block: `with bus.lease("jobs", max=10) as jobs:`.

        At the end of the block they are acknowledged; after an exception they are given back with it as the reason.
        If the broker refuses an acknowledgement, because a lease could not be extended and another has the message, the
        block raises LeaseExpired, NotLeaseHolder or MessageGone. Messages about which something was said in the block,
        with a queue's methods, are left as that said.

        Parameters:
            topic: whose messages.
            max: how many at most.
            subscription: which.
            lease: for how many seconds; by default as the subscription's settings say. It is extended by itself.
            wait: how many seconds to wait when there is none.
            deserializer: as for `queue`.
            create: as for `queue`.
        """
        queue = self.queue(topic, subscription, deserializer=deserializer, create=create)
        return queue.leased(max, lease=lease, wait=wait)

    # The bus itself.

    def _connect(self, wait: float = 0.0) -> None:
        """Make the first connection; `headrace.connect` has done it."""
        try:
            self._broker.connect(checked_timeout(wait, "wait"))
        except BaseException:
            self.close()
            raise

    def _consuming_line(self) -> ReconnectingConnection:
        """The connection for deliveries, made now if there is none."""
        deadline = now() + self._timeout
        with self._consuming_lock:
            self._check_open()
            self._broker.check_open()
            if self._consuming is None:
                broker = ReconnectingConnection(
                    self._target, self._hello, self._timeout, self._timers, self._memory, self.clock
                )
                broker.connect(deadline - now())  # the broker may just be starting again
                self._consuming = broker
            return self._consuming

    def _shared_leasing(self, topic: str, subscription: str) -> tuple[Acknowledger, LeaseRequester]:
        """What all users of a leased subscription share."""
        check_name(topic, "a topic")
        check_name(subscription, "a subscription")
        shared = self._leasing.get((topic, subscription))
        if shared is None:
            acknowledger = Acknowledger(self._broker, self._timers, self.clock, topic, subscription)
            shared = self._leasing.setdefault((topic, subscription), (acknowledger, LeaseRequester(self, acknowledger)))
        return shared

    def _keep(self, part: Subscription | Jobs) -> None:
        """Close this one with the bus."""
        self._receiving.add(part)

    def _forget(self, part: Subscription | Jobs) -> None:
        """This one is closed."""
        self._receiving.discard(part)

    def _disown(self) -> None:
        """In a forked child: begin anew, and leave to the parent what is under way."""
        self._hello.name = self._given_name or default_name()
        self._timers.disown()
        self.clock.in_use = False
        self._broker.disown()
        self._metadata_cache.disown()
        if self._consuming is not None:
            self._consuming.disown()
        self._consuming, self._consuming_lock = None, Lock()
        for part in self._receiving.alive():
            part._disown()
        for producer in self._producers.alive():
            producer._disown()
        for acknowledger, lease_requester in self._leasing.values():
            acknowledger.disown()
            lease_requester.disown()

    def close(self) -> None:
        """Close producers and subscriptions, and end the connections.

        Producers deliver what they have first; if one cannot, the error is raised after all is closed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            failed = self._close_parts(now())  # one deadline for all of them
        finally:  # also when it is interrupted: nothing may go on that nobody can end any more
            self._abandon_parts()
            self._close_lines([broker for broker in (self._consuming, self._broker) if broker is not None])
        if failed is not None:
            raise failed

    def _close_lines(self, lines: list[ReconnectingConnection]) -> None:
        for broker in lines:  # all of them before anything is waited for
            broker.end()
        try:
            for broker in lines:
                broker.close()
            self._timers.close()
        finally:
            if self._on_close is not None:
                run_blocking(self._on_close)

    def _close_parts(self, began: float) -> HeadraceError | None:
        """Let all parts finish, at the same time; returns what the first has failed with."""
        failed: HeadraceError | None = None
        for producer in self._producers.alive():
            producer._send_gathered()
        for part in self._receiving.alive():
            try:
                part._close_by(began + self._timeout)
            except HeadraceError as error:
                failed = failed or error
        for producer in self._producers.alive():
            try:
                producer._close_since(began)
            except HeadraceError as error:
                failed = failed or error
        for acknowledger, _ in self._leasing.values():
            acknowledger.answered(began + self._timeout - now())
        return failed

    def _abandon_parts(self) -> None:
        for part in [*self._receiving.alive(), *self._producers.alive()]:
            part._abandon()
        for acknowledger, _ in self._leasing.values():
            acknowledger.close()

    def _abandon(self) -> None:
        """Close without waiting for the broker."""
        self._abandon_parts()
        for broker in (self._consuming, self._broker):
            if broker is not None:
                broker.end()
        self._timers.close()
        if self._on_close is not None:
            run_detached(self._on_close)

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield place_of(self._target)
        yield f"name={short(self._hello.name)}"
        yield state_of(closed=self._closed, connected=self._broker.connected, not_connected=True)

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True):
            self._closed = True
            self._timers.aside(self._abandon)
            warnings.warn(f"a bus was not closed: {self!r}", ResourceWarning, stacklevel=2, source=self)

    def __enter__(self) -> "Bus":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(address: str | None = None, *, name: str = "", timeout: float = 30.0, wait: float = 0.0) -> Bus:
    """Connect to a broker.

    Parameters:
        address: `headrace://host:port`, or `headrace+unix:///path/to/socket`; by default $HEADRACE_URL, or else
            `headrace://127.0.0.1:7390`.
        name: what this program calls itself in the broker's lists and logs; by default host, process and a number.
        timeout: how many seconds a request may take, reconnecting and repeating included.
        wait: for how many seconds to keep trying if the broker cannot be reached yet.
    """
    bus = Bus(parse_address(default_address() if address is None else address), name, timeout, None)
    bus._connect(wait)
    return bus


def attach(broker: Nearby, close: Callable[[], None], *, name: str = "", timeout: float = 30.0) -> Bus:
    """Connect to a broker in this process, which is closed with the bus."""
    bus = Bus(broker, name, timeout, close)
    bus._connect()
    return bus
