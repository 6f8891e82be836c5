"""Requests a Python process for `-m MODULE` from the fork server, and lives as long as that process.

python.sh runs it without site-packages, so that it starts at once. Without a server it executes Python itself.
"""

import os
import signal
import socket
import sys


def main() -> int:
    """Request a process and return its exit code."""
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        asking.connect(os.environ["HEADRACE_SPARK_FORKS"])
        signal.signal(signal.SIGTERM, lambda number, _: asking.send(b"%d" % number))
        socket.send_fds(asking, [b"?"], [0, 1, 2])
    except OSError:  # the server has ended with its parent process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    return int(asking.recv(100) or b"1")


if __name__ == "__main__":
    sys.exit(main())
