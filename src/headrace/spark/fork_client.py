"""Asks the fork server for a Python that runs `-m MODULE`, and lives for as long as that does.

Run by python.sh with nothing of site-packages, so that it begins at once. Without a server it becomes Python itself.
"""

import os
import signal
import socket
import sys


def main() -> int:
    """Ask; the exit code of the process that was forked."""
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        asking.connect(os.environ["HEADRACE_SPARK_FORKS"])
        signal.signal(signal.SIGTERM, lambda number, _: asking.send(b"%d" % number))
        socket.send_fds(asking, [b"?"], [0, 1, 2])
    except OSError:  # the process that has started the server is gone, and the server with it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    return int(asking.recv(100) or b"1")


if __name__ == "__main__":
    sys.exit(main())
