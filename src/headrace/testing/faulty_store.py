"""A shared store for tests: another store, with lost, late and doubled requests, outages and lies on command."""

import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, TypeVar

from headrace.model.errors import StoreUnavailable
from headrace.storage.stores.store import KeyExists, SharedStore, StoredObject, VersionMismatch

T = TypeVar("T")


class StoreOperation(NamedTuple):
    """An operation that a caller asked for, or that arrived late."""

    verb: str
    """put_new, replace, get, names or delete."""
    key: str
    """The key; the prefix of a listing, the first key of a deletion."""
    outcome: str
    """ok, exists, mismatch, failed; what happened in the store, whatever the caller was told."""
    told: str
    """What the caller was told: ok, exists, mismatch or unavailable; late if nobody waits any more."""


class FaultyStore(SharedStore):
    """A store in front of another one, whose faults repeat with the same seed if one thread calls it.

    The faults are attributes, which a test may change at any time. The shares are between 0 and 1.
    """

    def __init__(self, inner: SharedStore, seed: int = 0, *, sleep: Callable[[float], None] | None = None) -> None:
        """A store without faults as yet; `sleep` waits, in the test's own time."""
        self.inner = inner
        self.lost_requests = 0.0
        """The share of requests that never arrive: StoreUnavailable, and nothing happens."""
        self.lost_answers = 0.0
        """The share of requests whose answer is lost: StoreUnavailable, and it is done."""
        self.late = 0.0
        """The share of changes that arrive later: StoreUnavailable now; `deliver_late` or a later request does it."""
        self.doubled = 0.0
        """The share of changes that arrive a second time later."""
        self.late_delivered = 0.25
        """The share of requests before which one of those on their way arrives."""
        self.delay_s = (0.0, 0.0)
        """The least and the longest time that a request takes, if there is a `sleep`."""
        self.down = False
        """Whether no request arrives."""
        self.full = False
        """Whether nothing can be put; reading and deleting goes on."""
        self.ignores_conditions = False
        """Whether it lies: put_new overwrites, and replace replaces any version."""
        self.operations: list[StoreOperation] = []
        """All operations, in the order in which they happened."""
        self._random = Random(seed)
        self._sleep = sleep
        self._lock = threading.Lock()
        self._on_their_way: list[tuple[str, str, Callable[[], object]]] = []

    @property
    def location(self) -> str:
        """Where the other one is."""
        return self.inner.location

    def fail_half(self) -> None:
        """Let half of all requests fail: some before they arrive, some after, some late."""
        self.lost_requests, self.lost_answers, self.late = 0.2, 0.2, 0.1

    def heal(self) -> None:
        """End all faults; requests on their way still arrive."""
        self.lost_requests = self.lost_answers = self.late = self.doubled = 0.0
        self.down = self.full = self.ignores_conditions = False
        self.delay_s = (0.0, 0.0)

    def deliver_late(self) -> int:
        """Let all requests on their way arrive, in any order; returns how many there were."""
        with self._lock:
            arriving, self._on_their_way = self._on_their_way, []
            self._random.shuffle(arriving)
        for verb, key, call in arriving:
            self._arrive(verb, key, call)
        return len(arriving)

    def snapshot(self) -> dict[str, StoredObject]:
        """All objects, for `restore`."""
        found: dict[str, StoredObject] = {}
        after = ""
        while names := self.inner.names("", after):
            for name in names:
                if (stored := self.inner.get(name)) is not None:
                    found[name] = stored
            after = names[-1]
        return found

    def restore(self, snapshot: dict[str, StoredObject]) -> None:
        """Go back in time, as a store does that is restored from a backup."""
        now = self.snapshot()
        self.inner.delete([key for key in now if key not in snapshot or now[key].data != snapshot[key].data])
        for key, stored in snapshot.items():
            if key not in now or now[key].data != stored.data:
                self.inner.put_new(key, stored.data)

    def put_new(self, key: str, data: bytes) -> None:
        """Create an object, or fail as ordered."""
        self._ask("put_new", key, lambda: self._put_new(key, data))

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace an object, or fail as ordered."""
        return self._ask("replace", key, lambda: self._replace(key, data, version))

    def get(self, key: str) -> StoredObject | None:
        """Read an object, or fail as ordered."""
        return self._ask("get", key, lambda: self.inner.get(key))

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        """The first keys with a prefix behind `after`, or fail as ordered."""
        return self._ask("names", prefix, lambda: self.inner.names(prefix, after, count_max))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, or fail as ordered."""
        kept = list(keys)
        self._ask("delete", kept[0] if kept else "", lambda: self.inner.delete(kept))

    def remarks(self) -> list[str]:
        """Those of the other store."""
        return self.inner.remarks()

    def close(self) -> None:
        """Close the other store."""
        self.inner.close()

    def _put_new(self, key: str, data: bytes) -> None:
        if self.ignores_conditions and (found := self.inner.get(key)) is not None:
            self.inner.replace(key, data, found.version)
            return
        self.inner.put_new(key, data)

    def _replace(self, key: str, data: bytes, version: str) -> str:
        if self.ignores_conditions and (found := self.inner.get(key)) is not None:
            version = found.version
        return self.inner.replace(key, data, version)

    def _ask(self, verb: str, key: str, call: Callable[[], T]) -> T:
        changes = verb in ("put_new", "replace", "delete")
        with self._lock:
            chance, again, arrives = self._random.random(), self._random.random(), self._random.random()
            delay_s = self._random.uniform(*self.delay_s)
            which = self._random.randrange(1 << 30)
            late = None
            if self._on_their_way and arrives < self.late_delivered:
                late = self._on_their_way.pop(which % len(self._on_their_way))
        if late is not None:
            self._arrive(*late)
        if delay_s and self._sleep is not None:
            self._sleep(delay_s)
        if self.down or chance < self.lost_requests:
            self._fail(verb, key, "failed", "the request was lost")
        if self.full and verb in ("put_new", "replace"):
            self._fail(verb, key, "failed", "no space left")
        chance -= self.lost_requests
        if changes and self.lost_answers <= chance < self.lost_answers + self.late:
            self._send_later(verb, key, call)
            self._fail(verb, key, "failed", "the request is late")
        if changes and again < self.doubled:
            self._send_later(verb, key, call)
        return self._do(verb, key, call, answers=not 0 <= chance < self.lost_answers)

    def _do(self, verb: str, key: str, call: Callable[[], T], *, answers: bool) -> T:
        outcome, result, refusal = _outcome(call)
        if not answers:
            self._fail(verb, key, outcome, "the answer was lost")
        self._record(verb, key, outcome, outcome)
        if refusal is not None:
            raise refusal
        assert not isinstance(result, _NoResult)
        return result

    def _send_later(self, verb: str, key: str, call: Callable[[], object]) -> None:
        with self._lock:
            self._on_their_way.append((verb, key, call))

    def _arrive(self, verb: str, key: str, call: Callable[[], object]) -> None:
        if self.full and verb in ("put_new", "replace"):
            self._record(verb, key, "failed", "late")
            return
        self._record(verb, key, _outcome(call)[0], "late")

    def _fail(self, verb: str, key: str, outcome: str, why: str) -> None:
        self._record(verb, key, outcome, "unavailable")
        raise StoreUnavailable(f"the store {self.location} failed: {why}")

    def _record(self, verb: str, key: str, outcome: str, told: str) -> None:
        with self._lock:
            self.operations.append(StoreOperation(verb, key, outcome, told))


class _NoResult:
    """Stands for the result of what was refused."""


def _outcome(call: Callable[[], T]) -> tuple[str, T | _NoResult, Exception | None]:
    try:
        return "ok", call(), None
    except KeyExists as error:
        return "exists", _NoResult(), error
    except VersionMismatch as error:
        return "mismatch", _NoResult(), error
