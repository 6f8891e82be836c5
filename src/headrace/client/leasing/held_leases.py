"""What a client has in hand: leased messages that it has not settled yet, and when their leases must be extended."""

from collections.abc import Collection, Iterable

from headrace.client.leasing.jobs import Job
from headrace.model.leasing import LeasedPortion

NEVER_US = 1 << 62


class HeldLease:
    """Messages of one partition that are held under one token."""

    __slots__ = ("lease", "lease_ms", "offsets", "partition", "renew_us", "until_us")

    def __init__(self, portion: LeasedPortion, lease_ms: int, now_us: int) -> None:
        self.partition = portion.partition
        self.lease = portion.lease
        self.lease_ms = lease_ms
        """How long it was asked for; 0 is as long as the subscription says."""
        self.offsets = set(portion.all_offsets)
        self.extended(portion.until_us, now_us)

    def extended(self, until_us: int, now_us: int) -> None:
        """It ends then: extend it when half of the time is over."""
        self.until_us = until_us
        self.renew_us = now_us + (until_us - now_us) // 2


class HeldLeases:
    """All that is held of a subscription. Times are the broker's."""

    def __init__(self) -> None:
        self.renew_us = NEVER_US
        """When the first must be extended, if it is not settled before."""
        self._grips: dict[tuple[int, int], HeldLease] = {}
        self._lost: dict[tuple[int, int], set[int]] = {}
        """Messages whose leases ended and that are not settled yet: they are not extended, but can be acknowledged."""

    def __len__(self) -> int:
        return sum(len(held_lease.offsets) for held_lease in self._grips.values())

    def take(self, portions: Iterable[LeasedPortion], lease_ms: int, now_us: int) -> None:
        """These were leased just now."""
        for portion in portions:
            held_lease = HeldLease(portion, lease_ms, now_us)
            before = self._grips.setdefault((portion.partition, portion.lease), held_lease)
            if before is not held_lease:  # an answer may have several portions of a partition, under one token
                before.offsets.update(portion.all_offsets)
                before.extended(min(before.until_us, held_lease.until_us), now_us)
                held_lease = before
            self.renew_us = min(self.renew_us, held_lease.renew_us)

    def drop(self, partition: int, lease: int, offsets: Collection[int]) -> None:
        """These are settled, or lost."""
        held_lease = self._grips.get((partition, lease))
        if held_lease is not None:
            held_lease.offsets.difference_update(offsets)
            if not held_lease.offsets:
                del self._grips[partition, lease]
        if self._lost:
            self._drop_lost((partition, lease), offsets)

    def drop_one(self, partition: int, lease: int, offset: int) -> None:
        """This one is settled, or lost."""
        held_lease = self._grips.get((partition, lease))
        if held_lease is not None:
            held_lease.offsets.discard(offset)
            if not held_lease.offsets:
                del self._grips[partition, lease]
        if self._lost:
            self._drop_lost((partition, lease), (offset,))

    def lose_one(self, partition: int, lease: int, offset: int) -> None:
        """The broker refused to extend this one."""
        self.drop_one(partition, lease, offset)
        self._lost.setdefault((partition, lease), set()).add(offset)

    def lose_all(self) -> None:
        """Extend nothing any more."""
        for token, held_lease in self._grips.items():
            self._lost.setdefault(token, set()).update(held_lease.offsets)
        self._grips.clear()
        self.renew_us = NEVER_US

    def holds(self, job: Job) -> bool:
        """Whether it has not been settled yet, nor refused when its lease was to be extended."""
        held_lease = self._grips.get((job.partition, job.lease))
        return held_lease is not None and job.offset in held_lease.offsets

    def until_us(self, job: Job) -> int:
        """When its lease ends; 0 if it is not held."""
        held_lease = self._grips.get((job.partition, job.lease))
        return held_lease.until_us if held_lease is not None and job.offset in held_lease.offsets else 0

    def held(self, jobs: Iterable[Job]) -> list[Job]:
        """Those of the jobs that are held."""
        return [job for job in jobs if self.holds(job)]

    def unsettled(self, jobs: Iterable[Job]) -> list[Job]:
        """Those of the jobs that were not settled, also if their leases ended."""
        lost = self._lost
        if not lost:
            return self.held(jobs)
        return [job for job in jobs if self.holds(job) or job.offset in lost.get((job.partition, job.lease), ())]

    def renewable(self, now_us: int) -> list[HeldLease]:
        """Those that must be extended now; asked about again only when half of what is left is over, too."""
        grips = [held_lease for held_lease in self._grips.values() if held_lease.renew_us <= now_us]
        for held_lease in grips:
            held_lease.extended(held_lease.until_us, now_us)
        self.renew_us = min((held_lease.renew_us for held_lease in self._grips.values()), default=NEVER_US)
        return grips

    def ended(self, now_us: int) -> int:
        """Extend no more what could not be extended in time; returns how many messages that were."""
        over = [held_lease for held_lease in self._grips.values() if held_lease.until_us <= now_us]
        for held_lease in over:
            del self._grips[held_lease.partition, held_lease.lease]
            self._lost.setdefault((held_lease.partition, held_lease.lease), set()).update(held_lease.offsets)
        return sum(len(held_lease.offsets) for held_lease in over)

    def forget(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Extend nothing any more of what is held under these."""
        for token in tokens:
            self._grips.pop(token, None)
            self._lost.pop(token, None)

    def knows(self, token: tuple[int, int]) -> bool:
        """Whether something under this token is not settled."""
        return token in self._grips or token in self._lost

    def held_lease(self, partition: int, lease: int) -> HeldLease | None:
        """What is held under a token."""
        return self._grips.get((partition, lease))

    def _drop_lost(self, token: tuple[int, int], offsets: Collection[int]) -> None:
        lost = self._lost.get(token)
        if lost is not None:
            lost.difference_update(offsets)
            if not lost:
                del self._lost[token]
