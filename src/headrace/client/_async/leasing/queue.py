"""A queue: a leased subscription of a topic, from which messages are taken one by one."""

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
    """Takes messages of a topic, and says what became of them. Made by `bus.queue(...)`; costs nothing to make.

    Messages are leased: until they are settled, or the lease is over, nobody else has them. What is said about one
    message raises LeaseExpired, NotLeaseHolder or MessageGone if it is refused; what is said about a list of messages
    returns the refusals, with the reasons, and is done for all others.
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
        """Take messages that are ready; none when there are none.

        Should the answer get lost on its way, its messages are handed out again when the lease is over. Messages that
        cannot be deserialized are given back with the reason, and in the end become dead letters.

        Parameters:
            max: how many at most.
            lease: for how many seconds; by default as the subscription's settings say.
            wait: how many seconds to wait when there is none.
            bytes_max: how much at most, but one message in any case.
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
        """The same for use in `with`: at the end of the block messages are acknowledged, after an exception given back.

        Messages about which something was said in the block are left as that said. In the block leases are extended
        by themselves.

        Parameters:
            max: as for `lease`, like all others.
            lease: see there.
            wait: see there.
            bytes_max: see there.
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
        """Messages to iterate over, leased ahead so that the next one is there when it is asked for.

        Messages with a time are there beforehand and handed over when it has come by the broker's clock, never
        before. Leases of all messages in hand are extended by themselves.

        Parameters:
            prefetch: how many messages are leased ahead.
            ack: `auto`: a message is acknowledged when the next one is asked for, without waiting for the answer;
                `manual`: only what you say about it counts.
            lease: for how many seconds; by default as the subscription's settings say.
            timeout: iteration ends when no message has come for so many seconds; by default never.
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
        """These are done. Accepted also after the lease is over, if nobody else has taken the message since.

        Parameters:
            jobs: a message, or a list of them.
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
        """Keep these for longer.

        Parameters:
            jobs: a message, or a list of them.
            lease: for how many seconds from now on; by default as the subscription's settings say.
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
        """Give these back, to be handed out again; by default when the subscription's retry settings say.

        Parameters:
            jobs: a message, or a list of them.
            delay: after so many seconds; 0 is at once.
            until: or at this time.
            reason: why, for the dead letter, should it come to that.
            state: a few bytes for whoever gets the message next.
        """
        if not isinstance(state, bytes | bytearray | memoryview):
            raise InvalidArgument(f"a state is bytes, not {shown(state)}")
        if delay is not None and until is not None:
            raise InvalidArgument("give messages back for some time or until some time, not both")
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
        """These cannot be processed: make them dead letters.

        Parameters:
            jobs: a message, or a list of them.
            reason: why, for whoever looks at them.
        """
        heads = [Reject(self.topic, part, cut_reason(reason), self.subscription) for part in self._parts(jobs)]
        return await self._say(heads, jobs)

    async def _take(self, max: int, lease_ms: int, wait_ms: int, bytes_max: int, extend: bool = False) -> list[Job]:
        jobs = await self._lease_requester.take(max, lease_ms, wait_ms, bytes_max, extend, self._create)
        now_us = self._acknowledger.clock.now_us()
        for job in jobs:
            if job.due is not None:  # the broker has handed it out, so it is due, whatever we think that the time is
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
        """Raise what was refused about this message; others may have been settled together with it."""
        for refusal in refused:
            if refusal.offset == job.offset and refusal.partition == job.partition:
                raise refusal_error(job, refusal.code)
