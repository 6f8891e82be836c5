"""Receiving: messages and batches of topics, alone or as a member of a group."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from headrace.client._sync.concurrency import Lock, ResultCell, now
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client._sync.consumer.discovery import Discovery
from headrace.client._sync.consumer.fetcher import Fetcher
from headrace.client._sync.consumer.group_membership import GroupMembership
from headrace.client._sync.consumer.position_committer import PositionCommitter
from headrace.client._sync.consumer.runner import Runner
from headrace.client.app.handlers import Handler
from headrace.client.connection import fork_guard
from headrace.client.connection.identity import member_id
from headrace.client.consumer.deserializing import BatchDeserializer
from headrace.client.consumer.partition_reader import HandedPositions, OnCorrupt, PartitionReader
from headrace.client.consumer.subscription_options import validate_subscription
from headrace.client.producer.serializing import Deserializer, deserializer_of
from headrace.client.results import Received, ReceivedBatch
from headrace.client.times import Start, checked_count, checked_seconds, listed, spot_at
from headrace.model.arguments import check_flag, checked_timeout, shown
from headrace.model.errors import Closed, HeadraceError, InvalidArgument, MemberFenced
from headrace.model.representation import described, short, state_of
from headrace.model.requests import GroupJoin, Offsets

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

logger = logging.getLogger("headrace.client")


class Subscription:
    """Receives messages. Made by `bus.subscribe(...)`, which explains the settings.

    Iterate it for messages, or `batches()` for batches, which is faster; `run(handler)` calls a handler. Only one
    thread or task may use it at a time, except for `stop()`. In a `with` block it can be iterated repeatedly, and the
    end of the block closes it; otherwise it closes itself when its iteration ends, by `stop()` or by its time-out.

    Example:
        >>> receipts = bus.publish_many("orders", [b"3 apples", b"5 pears"])
        >>> with bus.subscribe("orders", group="billing", timeout=1) as orders:
        ...     for message in orders:
        ...         print(message.offset, message.value)
        0 b'3 apples'
        1 b'5 pears'
    """

    def __init__(
        self,
        bus: "Bus",
        topics: Sequence[str],
        *,
        group: str | None,
        patterns: Sequence[str],
        start: Start | Mapping[int, int],
        partitions: Sequence[int] | None,
        commit: Literal["auto", "manual"],
        commit_interval: float,
        deserializer: str | Deserializer | None,
        on_error: Literal["raise", "skip"] | Callable[[Any], Any],
        on_out_of_range: Literal["earliest", "latest", "raise"],
        on_corrupt: OnCorrupt,
        timeout: float | None,
        session_timeout: float,
        prefetch_bytes: int,
        create: bool,
    ) -> None:
        self._closed = True  # until all is well
        self._broker: ReconnectingConnection | None = None
        validate_subscription(topics, patterns, group, start, partitions, commit, on_out_of_range, on_corrupt)
        checked_seconds(session_timeout, "session_timeout", 0.001)
        checked_seconds(commit_interval, "commit_interval", 0.001)
        checked_count(prefetch_bytes, "prefetch_bytes")
        check_flag(create, "create")
        self.group = group
        self.topics = tuple(topics)
        self._bus = bus
        self._patterns = patterns
        self._start = start
        self._partitions = partitions
        self._auto_commit = commit == "auto"
        self._commit_interval = commit_interval
        self._deserializer = BatchDeserializer(deserializer_of(deserializer), on_error)
        self._timeout = None if timeout is None else checked_timeout(timeout)
        self._session_s = session_timeout
        self._prefetch_bytes = prefetch_bytes
        self._create = create
        self._on_out_of_range = on_out_of_range
        self._on_corrupt = on_corrupt
        self._entered = False
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._forks = fork_guard.count
        terms = (self._prefetch_bytes, self._on_out_of_range, self._on_corrupt)
        self._fetcher = Fetcher(self._bus._timers, *terms)
        self._guard = self._fetcher.monitor.guard
        self._broker = None
        self._membership: GroupMembership | None = None
        self._discovery: Discovery | None = None
        self._beginning = Lock()
        self._begun = False
        self._committer: PositionCommitter | None = None
        # What is being handed out: a batch's partition, its messages, and where the partition is when they are done.
        self._reader: PartitionReader | None = None
        self._messages: Iterator[Received] = iter(())
        self._next_offset = 0

    # Receiving.

    def __iter__(self) -> Iterator[Received]:
        """The messages, one by one; in each partition in order."""
        self.begin()
        while True:
            # The message before counts as processed now that the next one is asked for.
            reader = self._reader
            if reader is None:
                taken = self._take()
                if taken is None:
                    self._over()
                    return
                reader, batch = taken
                self._reader, self._next_offset = reader, batch.next_offset
                self._messages = self._deserializer.messages(batch)
            auto = self._auto_commit
            if auto:
                reader.done = reader.handed
            for message in self._messages:
                reader.handed = message.offset + 1
                yield message
                if auto:
                    reader.done = reader.handed
                if reader.gone:
                    break
            else:
                reader.handed = self._next_offset
            self._finish(reader)

    def batches(self) -> Iterator[ReceivedBatch]:
        """Iterate over the messages in the batches in which they were published: the fast way.

        Yields:
            Batches, whose `values`, `keys` and other columns are lists.

        Raises:
            TopicNotFound: if a topic does not exist.
            CorruptBatch: if messages are damaged, unless `on_corrupt` says otherwise.
            OffsetOutOfRange: if the next message was removed, with `on_out_of_range="raise"`.

        Example:
            >>> receipts = bus.publish_many("orders", [b"3 apples", b"5 pears"])
            >>> with bus.subscribe("orders", timeout=10) as orders:
            ...     for batch in orders.batches():
            ...         print(batch.values)
            ...         break
            [b'3 apples', b'5 pears']
        """
        self.begin()
        while True:
            if self._reader is not None:
                self._finish(self._reader)
            taken = self._take()
            if taken is None:
                self._over()
                return
            self._reader, batch = taken
            self._reader.handed = batch.next_offset
            yield batch

    def run(
        self,
        handler: Handler,
        *,
        workers: int = 1,
        on_error: Literal["raise", "skip"] | Callable[[Received, Exception], None] = "raise",
        stop_on_signals: bool = False,
    ) -> None:
        """Call a handler with every message, several at once; returns when `stop()` is called, or at the time-out.

        Messages of one partition are handled one after the other, in order. With automatic commits a message counts as
        processed when its handler has returned.

        Parameters:
            handler: called with each message: a function, or a coroutine function. With asyncio plain functions run in
                a thread; without it coroutines run on an event loop in its own thread.
            workers: how many messages are handled at once, each of another partition.
            on_error: when the handler raises: `raise` ends the run with that error, after the other workers have
                finished and committed; `skip` logs it and continues; a callable gets the message and the error, and
                ends the run only by raising.
            stop_on_signals: let SIGTERM and SIGINT stop it gracefully; a second one ends the process at once. In the
                main thread only.

        Raises:
            TopicNotFound: if a topic does not exist.
            Exception: what the handler raised, with `on_error="raise"`.

        Example:
            >>> receipts = bus.publish_many("orders", [b"3 apples", b"5 pears"])
            >>> with bus.subscribe("orders", group="billing", timeout=1) as orders:
            ...     orders.run(lambda message: print(message.value))
            b'3 apples'
            b'5 pears'
        """
        runner = Runner(
            self._fetcher,
            self._take,
            self._ended_batch,
            self._deserializer,
            handler,
            workers,
            on_error,
            self._auto_commit,
        )
        self.begin()
        if self._reader is not None:
            self._finish(self._reader)
        try:
            runner.run(self.stop, stop_on_signals)
        finally:
            try:
                if self._auto_commit and self._membership is not None:
                    self._commit_processed()
            finally:
                self._over()

    def stop(self) -> None:
        """End the iteration, or the run, after the messages that were already decoded; any thread may call it.

        Example:
            >>> receipt = bus.publish("orders", b"3 apples")
            >>> with bus.subscribe("orders") as orders:
            ...     for message in orders:
            ...         print(message.value)
            ...         orders.stop()
            b'3 apples'
        """
        self._fetcher.stop()

    # How far.

    @property
    def skipped(self) -> int:
        """How many damaged messages were passed over, as `on_corrupt` says."""
        return self._fetcher.skipped

    @property
    def lag(self) -> int:
        """How many messages there are to be processed, as of the last delivery of each partition."""
        with self._guard:
            return sum(reader.lag for reader in self._fetcher.readers.values())

    @property
    def assigned(self) -> dict[tuple[str, int], int]:
        """The topics and partitions that are being read, and the offsets at which processing goes on."""
        with self._guard:
            return {place: reader.done for place, reader in self._fetcher.readers.items()}

    def commit(self, upto: Received | ReceivedBatch | None = None) -> None:
        """Commit offsets of the group, and wait until they are safe.

        Parameters:
            upto: everything of its partition up to and including this message or batch; by default everything that was
                delivered, including the current message.

        Raises:
            MemberFenced: if the partition was assigned to another member; nothing was committed for it.
            InvalidArgument: if the subscription has no group.
            Timeout: if the broker does not answer in time.

        Example:
            >>> receipt = bus.publish("orders", b"3 apples")
            >>> with bus.subscribe("orders", group="billing", commit="manual", timeout=10) as orders:
            ...     message = next(iter(orders))
            ...     orders.commit(message)
        """
        fork_guard.check(self._forks, "a subscription")
        if self._membership is None:
            raise InvalidArgument("only a subscription with a group has positions to commit, once it has begun")
        if upto is not None and not isinstance(upto, Received | ReceivedBatch):
            raise InvalidArgument(f"commit up to a message or a batch that was received, not {shown(upto)}")
        with self._guard:
            if upto is None:
                for reader in self._membership.held():
                    reader.done = max(reader.done, reader.handed)
            else:
                place = upto.topic, upto.partition
                found = next((reader for reader in self._membership.held() if reader.place == place), None)
                if found is None:
                    raise MemberFenced(f"{upto.topic}[{upto.partition}] is not assigned to this member any more")
                found.done = upto.next_offset if isinstance(upto, ReceivedBatch) else upto.offset + 1
        self._commit_processed()

    def seek(self, to: Start, *, topic: str | None = None, partitions: Sequence[int] | None = None) -> None:
        """Continue at another offset. With a group, the next commit stores it.

        Parameters:
            to: `earliest`, `latest`, a datetime, or an offset.
            topic: only in this topic.
            partitions: only in these partitions.

        Raises:
            InvalidArgument: if the topic or a partition is not being read.
            Timeout: if the broker does not answer in time.

        Example:
            >>> receipts = bus.publish_many("orders", [b"3 apples", b"5 pears"])
            >>> with bus.subscribe("orders", timeout=10) as orders:
            ...     orders.seek(1)
            ...     message = next(iter(orders))
            >>> message.value
            b'5 pears'
        """
        spot = spot_at(to)
        numbers = None if partitions is None else listed(partitions, "partitions")
        self.begin()
        assert self._broker is not None
        deadline = now() + self._broker.timeout
        for name, number in list(self._fetcher.readers):
            if topic not in (None, name) or (numbers is not None and number not in numbers):
                continue
            offset = spot.value
            if spot.kind != "offset":
                head = Offsets(name, [number], spot.kind, spot.value)
                answer = self._broker.request(head, timeout=deadline - now())
                offset = answer.offsets[number]
            with self._guard:
                reader = self._fetcher.readers.get((name, number))
                if reader is not None:
                    reader.committed = reader.handed  # who goes elsewhere has finished with it
                    moved = self._fetcher.add(name, number, offset, reader.epoch, reader.optional)
                    moved.committed = moved.committing = -1  # wherever the group was: it is to be told
        if self._reader is not None and self._reader.gone:
            self._reader, self._messages = None, iter(())

    def _positions_handed(self) -> HandedPositions:
        """The positions of what was handed out: for a transaction that commits them.

        Raises MemberFenced when some of it was taken from this member: what was made of that must not be committed.
        """
        fork_guard.check(self._forks, "a subscription")
        if self._membership is None or self.group is None:
            raise InvalidArgument("only a subscription with a group has positions to commit, once it has begun")
        with self._guard:
            held = self._membership.held()
            lost = [reader for reader in self._fetcher.taken_away() if reader not in held]
            offsets = [(reader, reader.handed) for reader in held if reader.handed > reader.committed]
        if lost:
            where = ", ".join(sorted(f"{reader.topic}[{reader.partition}]" for reader in lost))
            raise MemberFenced(f"{where} was taken from this member; what it handed out of it will be delivered again")
        return HandedPositions(self.group, self._membership.member, offsets)

    def _positions_committed(self, positions: HandedPositions) -> None:
        """A transaction has committed these; also of a reader that was replaced before the answer came."""
        with self._guard:
            for reader, offset in positions.offsets:
                reader.done = max(reader.done, offset)
                reader.committed = reader.committing = max(reader.committed, offset)

    def _join_again(self, deadline: float) -> None:
        """Join the group again, as it does not know this member; partitions that are still assigned have new epochs."""
        assert self._membership is not None
        self._membership.join_again(deadline)

    # Beginning and end.

    def begin(self) -> None:
        """Resolve the topics, and join the group; iterating does it.

        Raises:
            TopicNotFound: if a topic does not exist.
            Timeout: if the broker does not answer in time.

        Example:
            >>> receipt = bus.publish("orders", b"3 apples")
            >>> orders = bus.subscribe("orders", group="billing")
            >>> orders.begin()
            >>> orders.close()
        """
        fork_guard.check(self._forks, "a subscription")
        if not self._begun:
            with self._beginning:
                self._begin_once()

    def _disown(self) -> None:
        """In a forked child: what was begun is the parent's; what was not can be begun here."""
        forks, begun = self._forks, self._broker is not None
        if self._reader is not None:
            self._reader.gone = True
        self._reset()
        if begun:
            self._closed = True
            self._forks = forks

    def close(self) -> None:
        """Commit processed messages (with automatic commits), leave the group, and close.

        Raises:
            Timeout: if the broker does not answer the last commit in time.

        Example:
            >>> receipt = bus.publish("orders", b"3 apples")
            >>> orders = bus.subscribe("orders", group="billing")
            >>> orders.begin()
            >>> orders.close()
        """
        if not self._closed:
            self._close_by(now() + (0.0 if self._broker is None else self._broker.timeout))

    def _close_by(self, deadline: float) -> None:
        """Close, and wait for the broker until then at most."""
        if self._closed:
            return
        self._closed = True
        self.stop()
        try:
            if self._membership is not None:
                self._leave(self._membership, deadline)
        finally:
            self._let_go()
            self._bus._forget(self)

    def _abandon(self) -> None:
        """End without waiting for the broker."""
        if not self._closed:
            self._closed = True
            self.stop()
            self._let_go()

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield short(" ".join([*self.topics, *self._patterns]))
        yield "" if self.group is None else f"group={short(self.group)}"
        yield f"partitions={len(self._fetcher.readers)}"
        yield state_of(forked=self._forks != fork_guard.count, closed=self._closed, reading=self._begun, not_begun=True)

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True) and self._broker is not None:
            self._bus._timers.aside(self._abandon)  # or the group would wait for a member that reads nothing

    def __enter__(self) -> "Subscription":
        self._entered = True
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._reader is not None:
            self._finish(self._reader)  # left in peace: the last message was processed too
        self.close()

    def _over(self) -> None:
        """The iteration has come to its end: whoever wants another one uses `with`."""
        if not self._entered:
            self.close()

    def _begin_once(self) -> None:
        if self._closed:
            raise Closed("the subscription is closed; use it in `with` to iterate it more than once")
        if self._begun:
            return  # another was quicker
        began = now()
        broker = self._bus._consuming_line()
        try:
            self._broker = broker
            if self.group is None:
                self._begin_alone(broker, began + broker.timeout)
            else:
                self._begin_in_group(broker, self.group, began + broker.timeout)
        except BaseException:
            self._let_go()
            self._broker = self._membership = self._committer = self._discovery = None
            raise
        self._begun = True

    def _begin_alone(self, broker: ReconnectingConnection, deadline: float) -> None:
        self._discovery = Discovery(
            broker, self._fetcher, self._bus._timers, self.topics, self._patterns, self._partitions, self._create
        )
        broker.listen(self._fetcher)
        self._discovery.begin(self._start, deadline)

    def _begin_in_group(self, broker: ReconnectingConnection, group: str, deadline: float) -> None:
        assert not isinstance(self._start, Mapping)
        spot = spot_at(self._start)
        session_ms = round(self._session_s * 1000)
        member = member_id(self._bus.name)
        joining = GroupJoin(group, member, list(self.topics), list(self._patterns), spot.kind, spot.value, session_ms)
        joining.missing = "create" if self._create else "refuse"
        membership = self._membership = GroupMembership(self._fetcher, self._bus._timers, joining, self._auto_commit)
        self._committer = PositionCommitter(membership, self._bus._timers)
        broker.ping_every(self._session_s / 3)
        broker.listen(membership)
        membership.joined.wait(max(deadline - now(), 0.001))
        if self._auto_commit:
            self._committer.start(self._commit_interval)

    def _leave(self, membership: GroupMembership, deadline: float) -> None:
        try:
            if self._auto_commit:
                self._commit_processed(deadline)
            left: ResultCell[None] = ResultCell()
            membership.leave(lambda _answer, _body: left.resolve(None))
            left.wait(max(deadline - now(), 0.001))
        except HeadraceError as error:
            logger.warning("the group %s was left without a commit: %s", self.group, error)

    def _let_go(self) -> None:
        """Give back what the broker keeps for this subscription, without waiting: member and streams."""
        if self._committer is not None:
            self._committer.stop()
        if self._discovery is not None:
            self._discovery.close()
        broker, membership = self._broker, self._membership
        if membership is not None:
            if self._auto_commit:
                membership.commit_nowait(lambda _error: None)
            membership.leave(lambda _answer, _body: None)
        if broker is not None:
            broker.forget(self._fetcher)
            if membership is not None:
                broker.forget(membership)
        self._fetcher.clear()

    # How it is done.

    def _take(self) -> tuple[PartitionReader, ReceivedBatch] | None:
        """The next batch, which is in use from now on."""
        fork_guard.check(self._forks, "a subscription")
        if self._closed:
            raise Closed("the subscription is closed; use it in `with` to iterate it more than once")
        taken = self._fetcher.take(None if self._timeout is None else now() + self._timeout)
        if taken is not None:
            taken[0].using += 1
        return taken

    def _finish(self, reader: PartitionReader) -> None:
        """What was handed out of the present batch is processed."""
        self._reader, self._messages = None, iter(())
        self._ended_batch(reader, reader.handed)

    def _ended_batch(self, reader: PartitionReader, done: int) -> None:
        with self._guard:
            reader.using -= 1
            if self._auto_commit:
                reader.done = max(reader.done, done)
        if self._membership is not None:
            self._membership.let_go()

    def _commit_processed(self, deadline: float | None = None) -> None:
        assert self._committer is not None
        assert self._broker is not None
        self._committer.commit(now() + self._broker.timeout if deadline is None else deadline)
