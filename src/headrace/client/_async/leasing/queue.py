"""The work queue: leases and settles messages of a leased subscription."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, overload

from headrace.client._async.concurrency import ResultCell
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client._async.leasing.acknowledger import AsyncAcknowledger
from headrace.client._async.leasing.jobs import AsyncJobs
from headrace.client._async.leasing.lease_requester import AsyncLeaseRequester
from headrace.client._async.leasing.leased_block import AsyncLeasedBlock
from headrace.client._async.leasing.queue_inspection import AsyncQueueInspection
from headrace.client.leasing.deserializing import JobDeserializer
from headrace.client.leasing.jobs import Job, holdings_of, in_requests, refusal_error
from headrace.client.leasing.message_selection import lease_ms_of, span_ms, wait_ms_of
from headrace.client.producer.serializing import Deserializer, deserializer_of
from headrace.client.times import Moment, checked_count, microseconds
from headrace.model.arguments import check_flag, checked_timeout, shown
from headrace.model.errors import InvalidArgument
from headrace.model.leasing import Extend, Holding, Refusal, Reject, Release, cut_reason
from headrace.model.representation import described, short, state_of

if TYPE_CHECKING:
    from headrace.client._async.bus import AsyncBus


class AsyncQueue(AsyncQueueInspection):
    """A work queue: leases messages of a topic, and settles them. Made by `bus.queue(...)`, which costs nothing.

    Until a leased message is settled, or its lease expires, no other worker gets it. A method that settles one message
    raises LeaseExpired, NotLeaseHolder or MessageGone if the broker refuses it; a method that settles a list returns
    the refusals, with the reasons, and settles all others.

    Example:
        >>> receipts = await bus.publish_many("jobs", [b"resize 1.png", b"resize 2.png"])
        >>> queue = bus.queue("jobs")
        >>> for job in await queue.lease(max=2):
        ...     print(job.value)
        ...     await queue.ack(job)
        b'resize 1.png'
        b'resize 2.png'
    """

    def __init__(
        self,
        bus: "AsyncBus",
        broker: AsyncReconnectingConnection,
        acknowledger: AsyncAcknowledger,
        lease_requester: AsyncLeaseRequester,
        deserializer: str | Deserializer | None,
        create: bool = False,
    ) -> None:
        check_flag(create, "create")
        super().__init__(broker, acknowledger.topic, acknowledger.subscription)
        self._bus = bus
        self._acknowledger = acknowledger
        self._lease_requester = lease_requester
        self._unpacking = JobDeserializer(deserializer_of(deserializer))
        self._create = create

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield f"{self.topic} subscription={short(self.subscription)}"
        yield state_of(closed=self._broker.closed)

    async def lease(
        self,
        max: int = 10,
        *,
        lease: float | timedelta | None = None,
        wait: float | timedelta = 0.0,
        bytes_max: int = 1 << 20,
    ) -> list[Job]:
        """Lease messages that are ready.

        If the answer is lost, the broker delivers its messages again when the lease expires. Messages that cannot be
        decoded are released with the reason, and in the end become dead letters.

        Parameters:
            max: how many messages at most.
            lease: for how many seconds; by default the subscription's setting.
            wait: how many seconds to wait if no message is ready.
            bytes_max: how many bytes at most, but at least one message.

        Returns:
            The leased messages; none if none is ready.

        Raises:
            TopicNotFound: if the topic does not exist and the queue was opened without `create`.
            InvalidArgument: if an argument is wrong.

        Example:
            >>> receipt = await bus.publish("jobs", b"resize cat.jpg")
            >>> jobs = await bus.queue("jobs").lease(max=10, lease=60)
            >>> [(job.value, job.deliveries) for job in jobs]
            [(b'resize cat.jpg', 1)]
        """
        return await self._take(max, lease_ms_of(lease), wait_ms_of(wait), bytes_max)

    def leased(
        self,
        max: int = 10,
        *,
        lease: float | timedelta | None = None,
        wait: float | timedelta = 0.0,
        bytes_max: int = 1 << 20,
    ) -> AsyncLeasedBlock:
        """Lease messages for a block: acknowledged at its end, released if it raises.

        Messages that the block settled itself are left alone. In the block leases are extended automatically.

        Parameters:
            max: as for `lease`.
            lease: as for `lease`.
            wait: as for `lease`.
            bytes_max: as for `lease`.

        Returns:
            A context manager that yields the list of jobs.

        Raises:
            TopicNotFound: in `with`, if the topic does not exist.
            LeaseExpired: at the end of the block, if another worker has a message.

        Example:
            >>> receipt = await bus.publish("jobs", b"resize cat.jpg")
            >>> async with bus.queue("jobs").leased(max=10) as jobs:
            ...     print(len(jobs))
            1
        """
        terms = (max, lease_ms_of(lease), wait_ms_of(wait), bytes_max)
        return AsyncLeasedBlock(self._acknowledger, lambda: self._take(*terms, extend=True), self.ack, self.release)

    def jobs(
        self,
        prefetch: int = 100,
        *,
        ack: Literal["auto", "manual"] = "auto",
        lease: float | timedelta | None = None,
        timeout: float | None = None,
    ) -> AsyncJobs:
        """Iterate over messages that are leased ahead, so that the next one is there when it is requested.

        Messages with a due time are leased shortly before it and returned when it has come by the broker's clock, never
        earlier. The leases of all messages that the client holds are extended automatically.

        Parameters:
            prefetch: how many messages to lease ahead.
            ack: `auto`: acknowledge a message when the next one is requested, without waiting for the answer;
                `manual`: only you settle messages.
            lease: for how many seconds; by default the subscription's setting.
            timeout: end the iteration after so many seconds without a message; by default never.

        Returns:
            The jobs, to iterate over.

        Raises:
            InvalidArgument: if an argument is wrong.
            TopicNotFound: in the iteration, if the topic does not exist.

        Example:
            >>> receipts = await bus.publish_many("jobs", [b"resize 1.png", b"resize 2.png"])
            >>> async with bus.queue("jobs").jobs(timeout=10) as jobs:
            ...     async for job in jobs:
            ...         print(job.value)
            ...         break
            b'resize 1.png'
        """
        if ack not in ("auto", "manual"):
            raise InvalidArgument(f"ack is 'auto' or 'manual', not {shown(ack)}")
        checked_count(prefetch, "prefetch")
        jobs = AsyncJobs(
            self._bus,
            self._acknowledger,
            self._unpacking,
            prefetch=prefetch,
            lease_ms=lease_ms_of(lease),
            auto=ack == "auto",
            timeout=None if timeout is None else checked_timeout(timeout),
            create=self._create,
        )
        self._bus._keep(jobs)
        return jobs

    @overload
    async def ack(self, jobs: Job) -> None: ...

    @overload
    async def ack(self, jobs: Sequence[Job]) -> list[Refusal]: ...

    async def ack(self, jobs: Job | Sequence[Job]) -> list[Refusal] | None:
        """Acknowledge messages: they are processed.

        The broker accepts it also after the lease expired, if no other worker has leased the message since.
        After a reconnect the client repeats acknowledgements that were not answered; one whose message is gone counts
        as done then, because the broker cannot tell whether the first one arrived.

        Parameters:
            jobs: a job, or a list of jobs.

        Returns:
            For a list, the refusals; for one job, None.

        Raises:
            LeaseExpired: for one job, if its lease expired and another worker has the message, or may have it.
            NotLeaseHolder: for one job, if it is not leased by this token.
            MessageGone: for one job, if it is already settled or removed.

        Example:
            >>> receipt = await bus.publish("jobs", b"resize cat.jpg")
            >>> queue = bus.queue("jobs")
            >>> await queue.ack(await queue.lease(max=10))
            []
        """
        if isinstance(jobs, Job):
            refused = await self._acknowledger.ack_one(jobs).wait()
            if refused:
                self._raise(jobs, refused)
            return None
        return await self._refused(self._acknowledger.ack_many(jobs))

    @overload
    async def extend(self, jobs: Job, lease: float | timedelta | None = None) -> None: ...

    @overload
    async def extend(self, jobs: Sequence[Job], lease: float | timedelta | None = None) -> list[Refusal]: ...

    async def extend(self, jobs: Job | Sequence[Job], lease: float | timedelta | None = None) -> list[Refusal] | None:
        """Extend the leases of messages.

        Parameters:
            jobs: a job, or a list of jobs.
            lease: for how many seconds from now on; by default the subscription's setting.

        Returns:
            For a list, the refusals; for one job, None.

        Raises:
            LeaseExpired: for one job, if its lease expired.
            NotLeaseHolder: for one job, if it is not leased by this token.
            MessageGone: for one job, if it is already settled or removed.

        Example:
            >>> receipt = await bus.publish("jobs", b"resize cat.jpg")
            >>> queue = bus.queue("jobs")
            >>> jobs = await queue.lease()
            >>> await queue.extend(jobs, lease=300)
            []
        """
        lease_ms = lease_ms_of(lease)
        heads = [Extend(self.topic, part, lease_ms, self.subscription) for part in self._parts(jobs)]
        return await self._say(heads, jobs)

    @overload
    async def release(
        self,
        jobs: Job,
        delay: float | timedelta | None = None,
        *,
        until: Moment | None = None,
        reason: str = "",
        state: bytes = b"",
    ) -> None: ...

    @overload
    async def release(
        self,
        jobs: Sequence[Job],
        delay: float | timedelta | None = None,
        *,
        until: Moment | None = None,
        reason: str = "",
        state: bytes = b"",
    ) -> list[Refusal]: ...

    async def release(
        self,
        jobs: Job | Sequence[Job],
        delay: float | timedelta | None = None,
        *,
        until: Moment | None = None,
        reason: str = "",
        state: bytes = b"",
    ) -> list[Refusal] | None:
        """Release messages, to be delivered again; by default after the delay of the subscription's retry settings.

        Parameters:
            jobs: a job, or a list of jobs.
            delay: after so many seconds; 0 is at once.
            until: or at this time.
            reason: why, for the dead letter that it may become.
            state: a few bytes for the next holder.

        Returns:
            For a list, the refusals; for one job, None.

        Raises:
            LeaseExpired: for one job, if its lease expired.
            NotLeaseHolder: for one job, if it is not leased by this token.
            MessageGone: for one job, if it is already settled or removed.

        Example:
            >>> receipt = await bus.publish("jobs", b"resize cat.jpg")
            >>> queue = bus.queue("jobs")
            >>> await queue.release(await queue.lease(), delay=0, state=b"half done")
            []
            >>> (await queue.lease())[0].state
            b'half done'
        """
        if not isinstance(state, bytes | bytearray | memoryview):
            raise InvalidArgument(f"a state is bytes, not {shown(state)}")
        if delay is not None and until is not None:
            raise InvalidArgument("release messages with a delay or until a time, not both")
        delay_ms = None if delay is None else span_ms(delay, "delay")
        until_us = None if until is None else microseconds(until)
        parts = self._parts(jobs)
        if state:  # the request has one map of states, for the messages of one partition
            parts = [[holding] for part in parts for holding in part]
        heads = [
            Release(
                self.topic,
                part,
                delay_ms,
                until_us,
                cut_reason(reason),
                dict.fromkeys(part[0].all_offsets, bytes(state)) if state else {},
                False,
                self.subscription,
            )
            for part in parts
        ]
        return await self._say(heads, jobs)

    @overload
    async def reject(self, jobs: Job, reason: str = "") -> None: ...

    @overload
    async def reject(self, jobs: Sequence[Job], reason: str = "") -> list[Refusal]: ...

    async def reject(self, jobs: Job | Sequence[Job], reason: str = "") -> list[Refusal] | None:
        """Reject messages that cannot be processed: they become dead letters.

        Parameters:
            jobs: a job, or a list of jobs.
            reason: why, for the dead letter.

        Returns:
            For a list, the refusals; for one job, None.

        Raises:
            LeaseExpired: for one job, if its lease expired.
            NotLeaseHolder: for one job, if it is not leased by this token.
            MessageGone: for one job, if it is already settled or removed.

        Example:
            >>> receipt = await bus.publish("jobs", b"resize cat.jpg")
            >>> queue = bus.queue("jobs")
            >>> await queue.reject(await queue.lease(), reason="not a picture")
            []
            >>> (await queue.stats()).dead
            1
        """
        heads = [Reject(self.topic, part, cut_reason(reason), self.subscription) for part in self._parts(jobs)]
        return await self._say(heads, jobs)

    async def _take(self, max: int, lease_ms: int, wait_ms: int, bytes_max: int, extend: bool = False) -> list[Job]:
        jobs = await self._lease_requester.take(max, lease_ms, wait_ms, bytes_max, extend, self._create)
        now_us = self._acknowledger.clock.now_us()
        for job in jobs:
            if job.due is not None:  # the broker has delivered it, so it is due, whatever our estimate of its clock
                self._acknowledger.handed_over(job, now_us if now_us > job.due else job.due)
        opened, failed = self._unpacking.opened_all(jobs)
        try:
            for job, reason in failed:
                await self.release([job], reason=reason)
        except BaseException:
            self._lease_requester.give_back(opened)
            raise
        return opened

    def _parts(self, jobs: Job | Sequence[Job]) -> list[list[Holding]]:
        return in_requests(holdings_of([jobs] if isinstance(jobs, Job) else jobs))

    async def _say(self, heads: Sequence[Extend | Release | Reject], jobs: Job | Sequence[Job]) -> list[Refusal] | None:
        refused = await self._refused([self._acknowledger.send(head) for head in heads])
        if not isinstance(jobs, Job):
            return refused
        if refused:
            self._raise(jobs, refused)
        return None

    async def _refused(self, settled: Sequence[ResultCell[list[Refusal]]]) -> list[Refusal]:
        if len(settled) == 1:
            return await settled[0].wait()
        return [refusal for each in settled for refusal in await each.wait()]

    def _raise(self, job: Job, refused: Sequence[Refusal]) -> None:
        """Raise the refusal of this message, if there is one; the batch may contain others."""
        for refusal in refused:
            if refusal.offset == job.offset and refusal.partition == job.partition:
                raise refusal_error(job, refusal.code)
