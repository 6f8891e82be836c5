"""A process whose main thread is interrupted all the time, as by Ctrl-C, while it appends to a log.

Run as: interrupted.py DIRECTORY SEED SECONDS. It ends with an error when something is lost, doubled or wrong.
"""

import contextlib
import json
import signal
import sys
import time
from random import Random
from types import FrameType

import headrace

INTERVAL_S = 0.0005
"""About how long it is left in peace."""


class Work:
    """Appends and flushes, and remembers what it was promised."""

    def __init__(self, log: headrace.Log, dice: Random) -> None:
        self._log = log
        self._dice = dice
        self._number = 0
        self.promised: dict[int, bytes] = {}
        """What each offset that was returned must say."""
        self.flushed = 0
        self._end = 0.0
        self.interrupts = 0

    def run(self, seconds: float) -> None:
        signal.signal(signal.SIGALRM, self._interrupt)
        end = self._end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                with contextlib.suppress(KeyboardInterrupt):
                    self._arm()
                    # An interrupt that comes while an object is given up is only printed, by Python itself.
                    stop = time.monotonic() + 4 * INTERVAL_S
                    while time.monotonic() < stop:
                        self._do_something()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def _arm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._dice.uniform(0.00002, 2 * INTERVAL_S))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if time.monotonic() >= self._end:
            return  # the work is done, and nobody expects an interrupt any more
        self.interrupts += 1
        # Once more, later: Python swallows an interrupt that comes while an object is being deleted.
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        raise KeyboardInterrupt

    def _do_something(self) -> None:
        chance = self._dice.random()
        if chance < 0.75:
            for _ in range(self._dice.choice((1, 5, 50))):
                self._append()
        elif chance < 0.85:
            self._number += 1
            values = [b"%d/%d" % (self._number, at) for at in range(self._dice.choice((3, 2000)))]
            offsets = self._log.append_many(values)
            self.promised |= dict(zip(offsets, values, strict=True))
        else:
            self.flushed = self._log.flush(sync=self._dice.random() < 0.5)

    def _append(self) -> None:
        self._number += 1
        value = b"%d" % self._number + b"x" * self._dice.choice((0, 10, 1000))
        key = b"k" if self._dice.random() < 0.1 else None
        self.promised[self._log.append(value, key)] = value


def main(path: str, seed: str, seconds: str) -> None:
    """Work, and see what came of it."""
    log = headrace.Log(path, segment_bytes=64 << 10, sync_every=0.005)
    work = Work(log, Random(int(seed)))
    # Starts the threads in peace: Python's own Thread.start can raise RuntimeError when an interrupt comes.
    work.promised[log.append(b"first")] = b"first"
    log.flush()
    work.run(float(seconds))
    assert log.next_offset > max(work.promised), "promised offsets are not there"
    last = log.append(b"last")
    assert log.read(last).value == b"last"
    log.close()
    with headrace.Log(path) as log:
        assert log.recovery.sound
        values = {message.offset: message.value for message in log}
        assert log.verify().sound
    assert [*values] == [*range(last + 1)], "offsets are missing"
    bad = [offset for offset, value in work.promised.items() if values[offset] != value]
    assert not bad, f"{len(bad)} of {len(work.promised)} messages are not where they were promised, from {bad[0]} on"
    texts = [text for text in values.values() if text not in (b"last",)]
    assert len(texts) == len(set(texts)), "messages are there twice"
    print(json.dumps({"interrupts": work.interrupts, "messages": len(values), "flushed": work.flushed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
