"""The supervisor: starts and stops the pipelines of its host as their records say, while any should run."""

import logging
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

from headrace.client._sync.bus import Bus
from headrace.model.errors import HeadraceError
from headrace.spark.pipelines import logs
from headrace.spark.pipelines.children import Drivers
from headrace.spark.pipelines.paths import Lock, is_locked, try_lock
from headrace.spark.pipelines.record_copies import RecordCopies
from headrace.spark.pipelines.records import PipelineRecord
from headrace.spark.pipelines.registry import Registry
from headrace.spark.pipelines.supervisor_decisions import Do, ObservedDriver, SupervisionState, decide

logger = logging.getLogger("headrace.pipelines")

LOOK_EVERY_S = 0.25
LINGER_S = 1.0
"""How long an idle supervisor waits before it ends."""
_LOGS_EVERY_S = 5.0
_CHECK_EVERY_S = 2.0
"""How often to check that the broker still has all records."""


def host_name() -> str:
    """Return this host's name in records."""
    return socket.gethostname()


def lock_path(home: Path) -> Path:
    """Return the path of the supervisor's lock."""
    return home / "supervisor.lock"


def supervised(home: Path) -> bool:
    """Return whether a supervisor is running here."""
    return is_locked(lock_path(home))


class Supervisor:
    """Supervises the pipelines of one host and one broker."""

    def __init__(self, bus: Bus, home: Path, address: str, *, stay: bool, should_stop: Callable[[], bool]) -> None:
        self._registry = Registry(bus)
        self._home = home
        self._drivers = Drivers(home, address)
        self._copies = RecordCopies(home, host_name())
        self._stay = stay
        self._should_stop = should_stop
        self._host = host_name()
        self._states: dict[str, SupervisionState] = {}
        self._lock: Lock | None = None
        self._idle_since_s: float | None = None
        self._logs_s = 0.0
        self._checked_s = 0.0
        self._reached = True

    def run(self) -> bool:
        """Run until no pipeline should run or a stop is requested; returns False if another supervisor is running."""
        self._home.mkdir(parents=True, exist_ok=True)
        if not self._take_lock():
            return False
        logger.info("supervising", extra={"host": self._host, "home": str(self._home), "pid": os.getpid()})
        try:
            while self._tick():
                pass
        finally:
            self._release_lock()
        logger.info("supervisor ended", extra={"host": self._host})
        return True

    def _tick(self) -> bool:
        """Refresh the records and act on each once; returns whether to continue."""
        ending = self._should_stop()
        reached = self._refresh()
        if reached or ending:
            for record in self._own_records():
                self._supervise(record, ending)
        self._rotate_logs()
        if ending:
            return any(self._drivers.observe(record).alive for record in self._own_records())
        return self._stay or not self._is_idle() or self._more_came()

    def _refresh(self) -> bool:
        """Read new records; returns whether the broker could be reached."""
        try:
            if not self._reached:
                self._registry.prepare()
            self._registry.look(wait=LOOK_EVERY_S)
            self._check_records()
        except HeadraceError as error:
            if self._reached:
                logger.warning("broker unreachable; drivers keep running  error=%s", error)
            self._reached = False
            time.sleep(LOOK_EVERY_S)
            return False
        if not self._reached:
            logger.info("broker reachable again")
        self._reached = True
        return True

    def _check_records(self) -> None:
        """Restore records that are missing in the topic, as a user may have trimmed its log."""
        now_s = time.monotonic()
        missing = any(name not in self._registry.records for name in self._states)
        if missing or not self._checked_s or now_s - self._checked_s >= _CHECK_EVERY_S:
            self._checked_s = now_s
            self._registry.check_kept()
            self._copies.restore_missing(self._registry)
            self._states = {name: memory for name, memory in self._states.items() if name in self._registry.records}
        self._copies.store(self._own_records())

    def _own_records(self) -> list[PipelineRecord]:
        records = list(self._registry.records.values())
        return [each for each in records if each.belongs_to(self._host, str(self._home))]

    def _supervise(self, record: PipelineRecord, ending: bool) -> None:
        name, observed = record.name, self._drivers.observe(record)
        memory = self._states.get(name, SupervisionState())
        decision = decide(memory, record, observed, time.time_ns() // 1000, random.random(), ending=ending)
        if decision.record is not record and not self._store_state(record, decision.record) and not ending:
            return  # another writer has changed the record: the next tick decides again
        self._states[name] = decision.memory
        if decision.do is not None:
            self._do(decision.do, decision.record, observed)

    def _store_state(self, before: PipelineRecord, after: PipelineRecord) -> bool:
        """Store a changed record if the broker still has the old one; returns whether it was stored."""
        if not self._reached:
            return False
        try:
            now = self._registry.change(before.name, lambda current: after if current == before else None)
        except HeadraceError as error:
            logger.warning("state not stored  pipeline=%s error=%s", before.name, error)
            return False
        if after.state != before.state:
            why = {"error": after.error} if after.error_us != before.error_us and after.error else {}
            logger.info("%s is %s", after.name, after.state, extra=why)
        return now == after

    def _do(self, do: Do, record: PipelineRecord, observed: ObservedDriver) -> None:
        logger.info("%s %s", do.value, record.name, extra={"pid": observed.pid} if observed.pid else {})
        if do is Do.START:
            self._drivers.start(record)
        elif do is Do.TERMINATE:
            self._drivers.terminate(observed)
        else:
            self._drivers.kill(observed)

    def _rotate_logs(self) -> None:
        now_s = time.monotonic()
        if now_s - self._logs_s >= _LOGS_EVERY_S:
            self._logs_s = now_s
            for record in self._own_records():
                logs.rotate(self._drivers.folder(record.name).log)

    # The lock, and when to release it.

    def _is_idle(self) -> bool:
        """Return whether there has been nothing to do for the linger time."""
        idle = all(record.settled and not self._drivers.observe(record).alive for record in self._own_records())
        now_s = time.monotonic()
        self._idle_since_s = (self._idle_since_s or now_s) if idle else None
        return self._idle_since_s is not None and now_s - self._idle_since_s >= LINGER_S

    def _more_came(self) -> bool:
        """Release the lock, and take it again if a record was written meanwhile; returns whether it was taken.

        A client writes its record first, and starts a supervisor if then nobody holds the lock. So this supervisor
        sees records that were written while it held the lock, and later ones get a new supervisor.
        """
        self._release_lock()
        return self._refresh() and not self._is_idle() and self._take_lock()

    def _take_lock(self) -> bool:
        self._lock = try_lock(lock_path(self._home))
        return self._lock is not None

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
