"""A simulation of processes and their threads in virtual time: one thread runs at a time, and every run is the same.

Code that waits for a store or for another thread is written as it is: each simulated thread is a thread of the system,
which runs only while the simulation waits for it, until it sleeps, waits for an event, or ends.
"""

import heapq
import itertools
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from random import Random
from typing import Any, NoReturn, TypeVar

_STUCK_S = 60.0
"""A thread that does not give control back for so long, in real time, is stuck: it waits for a real lock."""

T = TypeVar("T")


class ProcessKilled(BaseException):
    """Raised in the threads of a process that was killed, wherever they are; nothing may catch it."""


class SimulationStuck(Exception):
    """A simulated thread waits for something that the simulation does not know of."""


class SimulatedProcess:
    """A process: its threads, which can be killed or paused together."""

    def __init__(self, simulation: "Simulation", name: str) -> None:
        self.name = name
        self.is_alive = True
        self.paused_until_us = 0
        self._simulation = simulation
        self.threads: list[SimulatedThread] = []
        self.on_death: list[Callable[[], None]] = []
        """Called when it is killed or ends, such as by its machine, which resets connections."""

    def spawn(self, name: str, call: Callable[[], None]) -> "SimulatedThread":
        """Start a thread."""
        self.check()
        thread = SimulatedThread(self._simulation, self, f"{self.name} {name}", call)
        self.threads.append(thread)
        self._simulation.wake(thread)
        return thread

    def check(self) -> None:
        """Raise ProcessKilled if it is dead."""
        if not self.is_alive:
            raise ProcessKilled(self.name)

    def kill(self) -> None:
        """End it at once; its threads end at their next step, and change nothing before that."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.paused_until_us = 0
        for thread in self.threads:
            self._simulation.wake(thread)
        for call in self.on_death:
            call()

    def die(self) -> NoReturn:
        """Kill the process of the thread that calls."""
        self.kill()
        raise ProcessKilled(self.name)


class SimulatedThread:
    """A thread of a process."""

    def __init__(
        self, simulation: "Simulation", process: SimulatedProcess, name: str, call: Callable[[], None]
    ) -> None:
        self.name = name
        self.process = process
        self.is_done = False
        self.turn = 0
        """Counts its waits: a wake-up for an earlier one is out of date."""
        self._simulation = simulation
        self._call = call
        self._go = threading.Lock()
        self._go.acquire()
        self._system_thread: threading.Thread | None = None

    def resume(self) -> None:
        """Let it run until it waits or ends; called by the simulation."""
        if self._system_thread is None:
            self._system_thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._system_thread.start()
        else:
            self._go.release()

    def park(self) -> None:
        """Give control back, and return when resumed; called on this thread."""
        self.turn += 1
        self._simulation.give_back()
        self._go.acquire()
        self.process.check()

    def _run(self) -> None:
        try:
            self.process.check()
            self._call()
        except ProcessKilled:
            pass
        except BaseException as error:  # noqa: BLE001 the simulation reports it
            self._simulation.report(self, error)
        self.is_done = True
        if self in self.process.threads:
            self.process.threads.remove(self)
        self._simulation.give_back()


class SimulatedEvent:
    """Something that threads wait for; once it is set, nobody waits until it is cleared."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._waiting: list[tuple[SimulatedThread, int]] = []
        self.is_set = False

    def set(self) -> None:
        """Let all go on who wait."""
        self.is_set = True
        waiting, self._waiting = self._waiting, []
        for thread, turn in waiting:
            self._simulation.wake(thread, turn=turn)

    def clear(self) -> None:
        """Let threads wait from now on."""
        self.is_set = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, or so long; returns whether it is set."""
        if self.is_set:
            return True
        thread = self._simulation.current
        thread.process.check()
        self._waiting.append((thread, thread.turn + 1))
        if timeout_s is not None:
            self._simulation.wake(thread, round(timeout_s * 1e6), turn=thread.turn + 1)
        thread.park()
        return self.is_set


class Simulation:
    """Virtual time, and what happens in it, in an order that depends on nothing but the seed."""

    def __init__(self, seed: int | str) -> None:
        self.random = Random(seed)
        self.now_us = 0
        self.failures: list[str] = []
        """What threads raised, which none should."""
        self._order = itertools.count()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._back = threading.Lock()
        self._back.acquire()
        self._running: SimulatedThread | None = None
        self._processes: list[SimulatedProcess] = []

    @property
    def current(self) -> SimulatedThread:
        """The thread that runs now."""
        assert self._running is not None, "only a simulated thread can wait"
        return self._running

    def new_process(self, name: str) -> SimulatedProcess:
        """A process without threads as yet."""
        process = SimulatedProcess(self, name)
        self._processes.append(process)
        return process

    def event(self) -> SimulatedEvent:
        """Something that threads can wait for."""
        return SimulatedEvent(self)

    def after(self, delay_us: int, call: Callable[[], None]) -> None:
        """Call something, which must not wait, after some time."""
        heapq.heappush(self._events, (self.now_us + max(delay_us, 0), next(self._order), call))

    def wake(self, thread: SimulatedThread, delay_us: int = 0, *, turn: int | None = None) -> None:
        """Let a thread run after some time; with `turn`, if it is still in this wait."""
        self.after(delay_us, lambda: self._resume(thread, turn))

    def sleep(self, seconds: float) -> None:
        """Let the current thread sleep."""
        thread = self.current
        thread.process.check()
        self.wake(thread, round(seconds * 1e6), turn=thread.turn + 1)
        thread.park()

    def run(self, until_us: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Let things happen until a time, or until something is true, or a thread has raised."""
        while self._events and self._events[0][0] <= until_us and not self.failures and not stop():
            self.now_us, _, call = heapq.heappop(self._events)
            call()
        if not self.failures and not stop():
            self.now_us = max(self.now_us, until_us)

    def close(self) -> None:
        """Kill all processes, and let their threads end."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            for thread in list(process.threads):
                self._resume(thread, None)

    def give_back(self) -> None:
        """Let the simulation go on; called by a thread that waits or ends."""
        self._back.release()

    def report(self, thread: SimulatedThread, error: BaseException) -> None:
        """Note that a thread has failed."""
        self.failures.append(f"{thread.name}: {''.join(traceback.format_exception(error))}")

    def _resume(self, thread: SimulatedThread, turn: int | None) -> None:
        if thread.is_done or (turn is not None and turn != thread.turn and thread.process.is_alive):
            return
        paused_us = thread.process.paused_until_us - self.now_us
        if paused_us > 0:
            self.wake(thread, paused_us, turn=turn)
            return
        self._running = thread
        thread.resume()
        if not self._back.acquire(timeout=_STUCK_S):
            raise SimulationStuck(f"{thread.name} waits for a real lock, or computes for ever")
        self._running = None


class InlineExecutor(Executor):
    """A pool without threads: runs each call at once."""

    def __init__(self, max_workers: int = 1, name: str = "") -> None:
        del max_workers, name

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Call it; its error is in the result."""
        done: Future[T] = Future()
        try:
            done.set_result(call(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 whoever asks for the result gets it
            done.set_exception(error)
        return done
