"""Where processes listen."""

import os
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
"""127.0.0.1, the same as an address of IPv6, and ::1, as the kernel writes them."""


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):  # it has just ended
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    found, new = [pid], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def listening(pids: list[int]) -> set[str]:
    """The addresses, as the kernel writes them, and ports on which any of these processes accepts connections."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets.add(os.readlink(fd))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1])
    return found


def elsewhere(addresses: set[str]) -> set[str]:
    """Those of them that other machines can reach."""
    return {each for each in addresses if each.partition(":")[0] not in LOOPBACK}
