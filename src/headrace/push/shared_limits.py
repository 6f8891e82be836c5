"""What all webhooks of a broker share: a number of requests at once, and memory for leased messages."""

from collections import Counter
from typing import Protocol, TypeVar

from headrace.model.limits import PUSH_BYTES_MAX, PUSH_REQUESTS_MAX


class LimitedWorker(Protocol):
    """Somebody who waits for a slot, or holds back while memory is full."""

    tenant: str

    def wake(self) -> None: ...


class RequestSlots:
    """Limits how many requests wait for their answers, so that those who hang do not stop the others.

    - The last quarter of the slots is for tenants that hold none: each gets one.
    - The quarter before it is for webhooks that hold none: each gets one.
    - Of the other half a webhook gets more, as long as it holds fewer than are left of it, and its tenant fewer than
      twice as many.
    - No tenant holds more than half of all.

    So whatever others do, as many tenants as a quarter has slots get one each. One tenant, whatever it does, leaves a
    quarter for webhooks of others that hold none. Of its own webhooks, those that hold several leave one slot each for
    a sixth as many as there are slots. Those who find none get the next ones in turn.
    """

    def __init__(self, count: int = PUSH_REQUESTS_MAX) -> None:
        self._free = count
        self._half, self._quarter = count // 2, count // 4
        self._of_tenants: Counter[str] = Counter()
        self._of_workers: Counter[LimitedWorker] = Counter()
        self._waiting: dict[LimitedWorker, None] = {}
        """Who found no slot, the longest waiting first."""

    def take(self, worker: LimitedWorker) -> bool:
        """Take a slot; if there is none for the worker, it is woken when there is one."""
        if not self._may_take(worker):
            self._waiting.setdefault(worker)
            return False
        self._waiting.pop(worker, None)
        self._free -= 1
        _add(self._of_tenants, worker.tenant, 1)
        _add(self._of_workers, worker, 1)
        return True

    def give_back(self, worker: LimitedWorker) -> None:
        """Give a slot back, and wake those who may take one now, the longest waiting first."""
        self._free += 1
        _add(self._of_tenants, worker.tenant, -1)
        _add(self._of_workers, worker, -1)
        for each in list(self._waiting):
            if each in self._waiting and self._may_take(each):
                del self._waiting[each]
                each.wake()

    def is_waiting(self, worker: LimitedWorker) -> bool:
        """Whether a worker has found no slot, and none has become free for it."""
        return worker in self._waiting

    def forget(self, worker: LimitedWorker) -> None:
        """Forget a worker that wants no more."""
        self._waiting.pop(worker, None)

    def _may_take(self, worker: LimitedWorker) -> bool:
        of_tenant = self._of_tenants[worker.tenant]
        if of_tenant == 0:
            return self._free > 0
        if self._free <= self._quarter or of_tenant >= self._half:
            return False
        of_worker, left = self._of_workers[worker], self._free - self._half
        return of_worker == 0 or (of_worker < left and of_tenant < 2 * left)


_Holder = TypeVar("_Holder")


def _add(counts: Counter[_Holder], holder: _Holder, more: int) -> None:
    """Count more or less; who has none is not remembered."""
    counts[holder] += more
    if not counts[holder]:
        del counts[holder]


class LeasedMemory:
    """Counts the bytes of leased messages. A tenant has half of them at most.

    Above a limit nobody leases more, or nobody of the tenant, until half of what it allows is settled.
    """

    def __init__(self, bytes_max: int = PUSH_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._of_tenants: Counter[str] = Counter()
        self._full_tenants: set[str] = set()
        self._is_full = False
        self.bytes = 0
        self.workers: set[LimitedWorker] = set()

    def is_full(self, tenant: str) -> bool:
        """Whether the workers of a tenant lease nothing more."""
        return self._is_full or tenant in self._full_tenants

    def add(self, tenant: str, size_bytes: int) -> None:
        """Count messages that a tenant has leased, or with a negative size, that were settled."""
        self.bytes += size_bytes
        _add(self._of_tenants, tenant, size_bytes)
        was_full = self.is_full(tenant), self._is_full
        self._is_full = self.bytes > (self._bytes_max // 2 if self._is_full else self._bytes_max)
        share = self._bytes_max // (4 if tenant in self._full_tenants else 2)
        (self._full_tenants.add if self._of_tenants[tenant] > share else self._full_tenants.discard)(tenant)
        if was_full != (self.is_full(tenant), self._is_full):
            for worker in list(self.workers):
                worker.wake()
