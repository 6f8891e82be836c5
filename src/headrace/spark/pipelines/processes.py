"""Other processes of this machine: whether they still are, and whether they are still the same."""

import os
import signal
import subprocess
from contextlib import suppress


def start_mark(pid: int) -> str | None:
    """What tells a process from a later one with the same id; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if os.path.isdir("/proc/self") else _start_by_ps(pid)
    # After the name come the state and then, as the 22nd field of all, when it began in ticks since the machine did.
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def is_alive(pid: int, started: str) -> bool:
    """Whether a process is still there, and no other that has got its id."""
    return bool(started) and start_mark(pid) == started


def send(pid: int, started: str, number: signal.Signals) -> None:
    """Send a signal to a process if it is still the same."""
    if is_alive(pid, started):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _start_by_ps(pid: int) -> str | None:
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
