"""Puts the write-ahead log of an epoch into the shared store, with threads, retries and back-off."""

import logging
import threading
import weakref
from collections.abc import Callable
from copy import copy
from random import Random
from typing import NamedTuple

from headrace.model.errors import Closed, HeadraceError, StoreUnavailable, Timeout
from headrace.storage.disk import SyncCallback, after_fork
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.wal import IN_FLIGHT_MAX, PendingObject, PutOutcome, Waiter, WriteAheadLog
from headrace.storage.stores.store import KeyExists, SharedStore

logger = logging.getLogger("headrace.storage")

_BACK_OFF_S = 0.05
_BACK_OFF_S_MAX = 2.0
_IDLE_S = 10.0
"""A thread that has nothing to put for so long ends."""
_JOIN_S = 1.0
_INLINE_S_MAX = 0.002
"""While puts take less than this on average, a thread that waits puts its object itself: to hand it over costs more."""
_SPACING_S_MAX = 0.025
"""Puts to a slow store begin at distances of a part of their latency, up to this, so that objects are of about equal
size. If each began as soon as possible, three small ones would go, and all that follows would wait for them."""
_LOGGED_EACH = 10
"""One of so many attempts that fail is logged."""


class WalStatistics(NamedTuple):
    """What a WalWriter has done, for metrics."""

    objects: int
    """Acknowledged by the store."""
    bytes: int
    """Of these objects."""
    put_seconds: float
    """The time of all puts together, with their retries."""
    retries: int
    backlog_bytes: int
    """Recorded and not committed."""
    in_flight: int
    confirmed_at: float
    """When the store last acknowledged an object, by the writer's clock; when the writer began, if it never did."""


class WalWriter:
    """Records operations and puts them into the store in order. Any thread may call it.

    Up to four threads, started when there is something to put, put one object each; while the store is quick, a thread
    that waits puts an object itself. A put that fails is repeated with
    the same bytes until it is answered, or until the writer is abandoned. If another has the position, the writer is
    fenced: everything raises Fenced from then on, and `on_fenced` is called once, on a thread of the writer.
    """

    def __init__(
        self,
        store: SharedStore,
        keys: ShardKeys,
        epoch: int,
        nonce: bytes,
        *,
        now_us: Callable[[], int],
        clock: Callable[[], float],
        position: int = 0,
        on_fenced: Callable[[], None] = lambda: None,
        on_committed: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the epoch that a claim with this nonce has made.

        :param now_us: the time that goes into objects, in microseconds since 1970.
        :param clock: measures durations, in seconds.
        :param position: the first free position: 1 if the claim has put object 0 itself.
        :param on_fenced: is called once when another has taken the shard over; the error is in `failure`.
        :param on_committed: is called, on a thread of the writer, after objects were committed.
        """
        self.keys = keys
        self.epoch = epoch
        self._store = store
        self._now_us = now_us
        self._clock = clock
        self._on_fenced = on_fenced
        self._on_committed = on_committed
        self._wal = WriteAheadLog(epoch, nonce, position)
        self._random = Random(nonce)
        self._objects = self._bytes = self._retries = 0
        self._put_seconds = 0.0
        self._latency_s: float | None = None
        """The moving average of the time that a put takes."""
        self._confirmed_at = clock()
        self._last_put = 0.0
        """When a thread last took an object to put."""
        self.event_loop_thread = 0
        """The thread, by its number, that never puts an object itself: `abandon` must wake it whenever it waits."""
        self._begin_threads()
        _writers.add(self)

    def _begin_threads(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._stopped = threading.Event()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._is_pausing = False
        """Whether a thread waits for the time of the next put."""
        self._doubtful: list[PendingObject] = []
        """Handed out, and left by a thread that put them once."""

    # What the disk records.

    @property
    def recorded(self) -> int:
        """The sequence of the last operation recorded."""
        return self._wal.recorded

    @property
    def backlog_bytes(self) -> int:
        """The size of the operations that are recorded and not committed."""
        return self._wal.backlog_bytes

    @property
    def failure(self) -> HeadraceError | None:
        """Why it writes no more: Fenced, StoreUnavailable or Closed."""
        return self._wal.failure

    @property
    def committed(self) -> Position:
        """The position up to which all objects are in the store."""
        return Position(self.epoch, self._wal.committed_objects)

    def check(self) -> None:
        """Raise if it writes no more."""
        if self._wal.failure is not None:
            raise copy(self._wal.failure)

    def record(self, operation: bytes) -> None:
        """Record an encoded operation. The caller has one lock around each local change and its record."""
        with self._lock:
            self._wal.record(operation)
            self._put_soon()

    def record_write(self, file_id: int, position: int, data: bytes) -> None:
        """Record a Write of data that does not change any more."""
        with self._lock:
            self._wal.record_write(file_id, position, data)
            self._put_soon()

    def cut(self) -> tuple[Position, int]:
        """End the object here: everything recorded is in the objects before this position, up to this sequence.

        They need not be in the store yet: `wait` for the sequence.
        """
        with self._lock:
            position = self._wal.cut()
            self._put_soon()
            return Position(self.epoch, position), self._wal.recorded

    # Waiting and ending.

    def push(self) -> None:
        """Begin to put everything recorded so far, and return at once."""
        with self._lock:
            self._wal.want(self._wal.recorded)
            self._put_soon()

    def wait(self, sequence: int | None = None, timeout: float | None = None) -> None:
        """Return when all operations up to a sequence are committed, by default all recorded so far.

        Raises Fenced or StoreUnavailable if they will not be, and Timeout after so many seconds.
        """
        gate = threading.Lock()
        gate.acquire()
        waiter = gate.release
        inline = None
        with self._lock:
            target = self._wal.recorded if sequence is None else sequence
            waits = self._wal.wait(target, waiter)
            if waits and timeout is None and self._is_quick and threading.get_ident() != self.event_loop_thread:
                inline = self._wal.next_put()
            if waits:
                self._put_soon()
        if inline is not None:
            self._put_inline(inline)
        if waits and not gate.acquire(timeout=-1 if timeout is None else timeout):
            with self._lock:
                self._wal.stop_waiting(waiter)
            raise Timeout(f"the shared store has not acknowledged everything in {timeout} s")
        if self._wal.committed < target or not waits:
            self.check()

    def when_committed(self, done: SyncCallback) -> None:
        """Call back, on any thread, when everything recorded so far is committed, or with the error."""

        def tell() -> None:
            done(None if self._wal.committed >= target or self._wal.failure is None else copy(self._wal.failure))

        with self._lock:
            target = self._wal.recorded
            waits = self._wal.wait(target, tell)
            if waits:
                self._put_soon()
        if not waits:
            tell()

    def flush(self, timeout: float | None = None) -> Position:
        """Wait until everything recorded is committed, for a hand-over; returns the position behind it."""
        self.wait(None, timeout)
        return self.committed

    def abandon(self, error: HeadraceError | None = None) -> None:
        """Give up: all who wait, and all later calls, get this error, by default StoreUnavailable.

        Puts that are in flight may still arrive: whoever claims the shard next finds them, and decides.
        """
        self._fail(error or StoreUnavailable("the node has given up writing to the shared store"))

    def close(self) -> None:
        """End the threads; what is not committed by now is abandoned. May be called again."""
        self._fail(Closed("the write-ahead log is closed"))
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def statistics(self) -> WalStatistics:
        """What it has done so far."""
        with self._lock:
            return WalStatistics(
                *(self._objects, self._bytes, self._put_seconds, self._retries),
                *(self._wal.backlog_bytes, self._wal.in_flight, self._confirmed_at),
            )

    # The threads.

    @property
    def _is_quick(self) -> bool:
        return self._latency_s is not None and self._latency_s < _INLINE_S_MAX

    @property
    def overlaps(self) -> bool:
        """Whether puts take so long that several are better under way at a time."""
        return self._latency_s is not None and self._latency_s >= _INLINE_S_MAX

    @property
    def _has_work(self) -> bool:
        return self._wal.has_put or bool(self._doubtful)

    def _put_soon(self) -> None:
        """Wake or start a thread if there is something to put; the caller has the lock."""
        if not self._has_work or self._is_pausing:
            return
        if self._idle:
            self._work.notify()
        elif len(self._threads) < IN_FLIGHT_MAX:
            thread = threading.Thread(target=self._run, name=f"headrace-wal-{self.epoch}", daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except BaseException:
                self._threads.discard(thread)
                raise

    def _run(self) -> None:
        try:
            while (taken := self._take()) is not None:
                self._put(taken)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _take(self) -> PendingObject | None:
        """The next object to put; None when the thread is to end."""
        with self._work:
            while not self._stopped.is_set():
                taken = self._doubtful.pop() if self._doubtful else None
                if taken is None and not self._is_pausing:
                    if self._pause():
                        continue
                    taken = self._wal.next_put()
                if taken is not None:
                    self._last_put = self._clock()
                    self._put_soon()  # another thread, if there is more
                    return taken
                self._idle += 1
                try:
                    was_woken = self._work.wait(_IDLE_S)
                finally:
                    self._idle -= 1
                if not was_woken and not self._has_work:
                    break
            self._threads.discard(threading.current_thread())  # before the lock goes: the next record starts another
            return None

    def _pause(self) -> bool:
        """Wait for the time of the next put, with the lock; returns whether it waited."""
        if not self._wal.in_flight or not self._wal.has_put:
            return False
        spacing_s = min((self._latency_s or 0.0) / IN_FLIGHT_MAX, _SPACING_S_MAX) if self.overlaps else 0.0
        left_s = self._last_put + spacing_s - self._clock()
        if left_s <= 0:
            return False
        self._is_pausing = True
        try:
            self._work.wait(left_s)
        finally:
            self._is_pausing = False
        return True

    def _put(self, pending: PendingObject) -> None:
        """Put an object, as often as necessary."""
        delay = _BACK_OFF_S
        while not self._stopped.is_set() and not self._put_once(pending):
            self._stopped.wait(delay * (0.5 + self._random.random()))
            delay = min(2 * delay, _BACK_OFF_S_MAX)

    def _put_inline(self, pending: PendingObject) -> None:
        """Put an object on the thread that waits for it; if that leaves a doubt, a thread of the writer goes on."""
        is_decided = False
        try:
            is_decided = self._put_once(pending)
        finally:  # also after an interrupt
            if not is_decided:
                with self._lock:
                    self._doubtful.append(pending)
                    self._put_soon()

    def _put_once(self, pending: PendingObject) -> bool:
        """Put an object; returns whether it is known what became of it."""
        if not pending.attempts:
            pending.began = self._clock()
        pending.attempts += 1
        data = pending.encoded(self.epoch, self._wal.nonce, self._now_us)
        outcome = self._attempt(pending, data)
        if outcome is PutOutcome.COMMITTED:
            self._acknowledge(pending, len(data))
        elif outcome is PutOutcome.AGAIN:
            self._retries += 1
        return outcome is not PutOutcome.AGAIN

    def _attempt(self, pending: PendingObject, data: bytes) -> PutOutcome:
        key = self.keys.wal(self.epoch, pending.position)
        try:
            self._store.put_new(key, data)
        except KeyExists:
            return self._look(pending.position, key)
        except Exception as error:  # whatever it was, the object may be stored or not
            if pending.attempts % _LOGGED_EACH == 1:
                unexpected = None if isinstance(error, StoreUnavailable) else error
                logger.warning(
                    *("WAL object not stored; retrying  key=%s attempts=%d reason=%s", key, pending.attempts, error),
                    exc_info=unexpected,
                )
            return PutOutcome.AGAIN
        return PutOutcome.COMMITTED

    def _look(self, position: int, key: str) -> PutOutcome:
        """Read the object that is in the way."""
        try:
            stored = self._store.get(key)
        except Exception as error:  # noqa: BLE001 whatever it was, only an object that was read decides
            logger.warning("WAL object exists and cannot be read; retrying  key=%s reason=%r", key, error)
            return PutOutcome.AGAIN
        found = None if stored is None else stored.data
        outcome = self._wal.compare(found)
        if outcome is PutOutcome.FENCED and found is not None and not self._stopped.is_set():
            fenced = self._wal.fenced_error(position, found)
            if self._fail(fenced):
                logger.warning("fenced  key=%s reason=%s", key, fenced)
                self._on_fenced()
        return outcome

    def _acknowledge(self, pending: PendingObject, size: int) -> None:
        now = self._clock()
        took_s = now - pending.began
        with self._lock:
            before = self._wal.committed_objects
            waiters = self._wal.acknowledge(pending.position)
            self._objects += 1
            self._bytes += size
            self._put_seconds += took_s
            self._latency_s = took_s if self._latency_s is None else self._latency_s + (took_s - self._latency_s) / 8
            self._confirmed_at = now
            has_advanced = self._wal.committed_objects > before
            if self._wal.committed_objects > before + 1:
                self._put_soon()  # others waited for this one, and there is room for several now
        _call(waiters)
        if has_advanced:
            self._on_committed()

    def _fail(self, error: HeadraceError) -> bool:
        """End it; returns whether it had not ended before."""
        with self._lock:
            is_first = self._wal.failure is None
            waiters = self._wal.fail(error)
            self._stopped.set()
            self._work.notify_all()
        _call(waiters)
        return is_first

    def abandon_in_child(self) -> None:
        """In a forked child: the threads are the parent's, and so is the epoch."""
        self._begin_threads()
        self._stopped.set()
        self._wal.fail(Closed("the write-ahead log belongs to the process that this one was forked from"))


def _call(waiters: list[Waiter]) -> None:
    for waiter in waiters:
        try:
            waiter()
        except Exception:  # those behind it wait as well
            logger.exception("callback of a sync failed")


_writers: weakref.WeakSet[WalWriter] = weakref.WeakSet()


def _abandon_all() -> None:
    for writer in list(_writers):
        writer.abandon_in_child()


after_fork(_abandon_all)
