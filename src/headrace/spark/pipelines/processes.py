"""Checks and signals processes of this machine, safely against reused process ids."""

import os
import signal
import subprocess
from contextlib import suppress


def start_mark(pid: int) -> str | None:
    """Return the start time of a process, which identifies it among reuses of its id; None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if os.path.isdir("/proc/self") else _start_by_ps(pid)
    # The fields after the name begin with the state; the 22nd field of all is the start time in ticks since boot.
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def is_alive(pid: int, started: str) -> bool:
    """Return whether a process with this id and start time is running."""
    return bool(started) and start_mark(pid) == started


def send(pid: int, started: str, number: signal.Signals) -> None:
    """Send a signal to a process with this id and start time."""
    if is_alive(pid, started):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _start_by_ps(pid: int) -> str | None:
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
