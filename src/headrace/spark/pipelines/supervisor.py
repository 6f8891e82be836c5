"""The supervisor: keeps the pipelines of its host as they are wanted, for as long as any is."""

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
from headrace.spark.pipelines.paths import Lock, is_locked, taken
from headrace.spark.pipelines.record_copies import RecordCopies
from headrace.spark.pipelines.records import PipelineRecord
from headrace.spark.pipelines.registry import Registry
from headrace.spark.pipelines.supervisor_decisions import Care, Do, Seen, decide

logger = logging.getLogger("headrace.pipelines")

LOOK_EVERY_S = 0.25
LINGER_S = 1.0
"""How long a supervisor that has nothing to do waits for more."""
_LOGS_EVERY_S = 5.0
_CHECK_EVERY_S = 2.0
"""How often to see whether the broker still has all records."""


def host_name() -> str:
    """What this host is called in records."""
    return socket.gethostname()


def lock_path(home: Path) -> Path:
    """The lock of the supervisor of a host."""
    return home / "supervisor.lock"


def supervised(home: Path) -> bool:
    """Whether a supervisor is at work here."""
    return is_locked(lock_path(home))


class Supervisor:
    """Looks after the pipelines of one host and one broker."""

    def __init__(self, bus: Bus, home: Path, address: str, *, stay: bool, asked: Callable[[], bool]) -> None:
        self._registry = Registry(bus)
        self._home = home
        self._drivers = Drivers(home, address)
        self._copies = RecordCopies(home, host_name())
        self._stay = stay
        self._asked = asked
        self._host = host_name()
        self._cares: dict[str, Care] = {}
        self._lock: Lock | None = None
        self._idle_since_s: float | None = None
        self._logs_s = 0.0
        self._checked_s = 0.0
        self._reached = True

    def run(self) -> bool:
        """Work until nothing is wanted any more, or somebody asks for the end; False if another is at work."""
        self._home.mkdir(parents=True, exist_ok=True)
        if not self._take_lock():
            return False
        logger.info("supervising", extra={"host": self._host, "home": str(self._home), "pid": os.getpid()})
        try:
            while self._tick():
                pass
        finally:
            self._let_go()
        logger.info("the supervisor ends", extra={"host": self._host})
        return True

    def _tick(self) -> bool:
        """Look once, and do what is to be done; whether to go on."""
        ending = self._asked()
        reached = self._look()
        if reached or ending:
            for record in self._mine():
                self._tend(record, ending)
        self._rotate_logs()
        if ending:
            return any(self._drivers.see(record).alive for record in self._mine())
        return self._stay or not self._is_idle() or self._more_came()

    def _look(self) -> bool:
        """Learn what is wanted; whether the broker could be asked."""
        try:
            if not self._reached:
                self._registry.prepare()
            self._registry.look(wait=LOOK_EVERY_S)
            self._check_records()
        except HeadraceError as error:
            if self._reached:
                logger.warning("the broker cannot be asked; drivers go on: %s", error)
            self._reached = False
            time.sleep(LOOK_EVERY_S)
            return False
        if not self._reached:
            logger.info("the broker is back")
        self._reached = True
        return True

    def _check_records(self) -> None:
        """Put back what the topic has lost: its log may be trimmed by anybody who takes it for an ordinary one."""
        now_s = time.monotonic()
        missing = any(name not in self._registry.records for name in self._cares)
        if missing or not self._checked_s or now_s - self._checked_s >= _CHECK_EVERY_S:
            self._checked_s = now_s
            self._registry.check_kept()
            self._copies.heal(self._registry)
            self._cares = {name: care for name, care in self._cares.items() if name in self._registry.records}
        self._copies.keep(self._mine())

    def _mine(self) -> list[PipelineRecord]:
        records = list(self._registry.records.values())
        return [each for each in records if each.belongs_to(self._host, str(self._home))]

    def _tend(self, record: PipelineRecord, ending: bool) -> None:
        name, seen = record.name, self._drivers.see(record)
        care = self._cares.get(name, Care())
        decision = decide(care, record, seen, time.time_ns() // 1000, random.random(), ending=ending)
        if decision.record is not record and not self._kept(record, decision.record) and not ending:
            return  # somebody was quicker: the next look decides anew
        self._cares[name] = decision.care
        if decision.do is not None:
            self._do(decision.do, decision.record, seen)

    def _kept(self, before: PipelineRecord, after: PipelineRecord) -> bool:
        """Whether the broker has taken a change, of what was known, and not of something newer."""
        if not self._reached:
            return False
        try:
            now = self._registry.change(before.name, lambda current: after if current == before else None)
        except HeadraceError as error:
            logger.warning("the broker did not take the state of %s: %s", before.name, error)
            return False
        if after.state != before.state:
            why = {"error": after.error} if after.error_us != before.error_us and after.error else {}
            logger.info("%s is %s", after.name, after.state, extra=why)
        return now == after

    def _do(self, do: Do, record: PipelineRecord, seen: Seen) -> None:
        logger.info("%s %s", do.value, record.name, extra={"pid": seen.pid} if seen.pid else {})
        if do is Do.START:
            self._drivers.start(record)
        elif do is Do.TERMINATE:
            self._drivers.terminate(seen)
        else:
            self._drivers.kill(seen)

    def _rotate_logs(self) -> None:
        now_s = time.monotonic()
        if now_s - self._logs_s >= _LOGS_EVERY_S:
            self._logs_s = now_s
            for record in self._mine():
                logs.rotate(self._drivers.folder(record.name).log)

    # The lock, and when to let go of it.

    def _is_idle(self) -> bool:
        """Whether there has been nothing to do for a while."""
        idle = all(record.settled and not self._drivers.see(record).alive for record in self._mine())
        now_s = time.monotonic()
        self._idle_since_s = (self._idle_since_s or now_s) if idle else None
        return self._idle_since_s is not None and now_s - self._idle_since_s >= LINGER_S

    def _more_came(self) -> bool:
        """Whether, after letting go of the lock, something is wanted that its holder should see to.

        Who wants something writes it first, and starts a supervisor if then nobody holds the lock. So what was
        written while it was held is seen here, and what comes later has a new supervisor.
        """
        self._let_go()
        return self._look() and not self._is_idle() and self._take_lock()

    def _take_lock(self) -> bool:
        self._lock = taken(lock_path(self._home))
        return self._lock is not None

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
