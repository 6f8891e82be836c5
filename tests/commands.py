"""Commands of `headrace` as processes of their own, forked from one that has Python and its modules loaded already.

That takes a tenth of the time that starting Python takes. Run as: commands.py DESCRIPTOR, that of a socket on which it
is asked, and which it ends with.
"""

import atexit
import ctypes
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from tempfile import TemporaryFile

from tests.known import ENVIRONMENT

Finished = subprocess.CompletedProcess[bytes]

_ASKED_BYTES_MAX = 1 << 20
_PR_SET_PDEATHSIG = 1
_PRELOADED = [
    "headrace.cli.main",
    "headrace.client._sync.bus",
    "headrace.embedded.log",
    *(f"headrace.cli.commands.{name}" for name in ("group", "publish", "tail", "topic", "log")),
]


def run_command(arguments: Sequence[str | bytes], stdin: bytes = b"", *, timeout_s: float) -> Finished:
    """Run a command to its end, in the environment and the directory of the test."""
    with ExitStack() as files:
        given, out, errors = (files.enter_context(TemporaryFile()) for _ in range(3))
        given.write(stdin)
        given.seek(0)
        words = [os.fsdecode(word) for word in arguments]
        asked = json.dumps({"words": words, "environment": dict(os.environ), "directory": os.getcwd()})
        status = _forking().ask(asked.encode(), [file.fileno() for file in (given, out, errors)], timeout_s)
        said = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in (out, errors)]
    return Finished(arguments, os.waitstatus_to_exitcode(status), *said)


class _Forking:
    """The test's end of the process that forks commands."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(number)], pass_fds=[number], env=ENVIRONMENT, stdin=subprocess.DEVNULL
            )
        atexit.register(self.close)

    def ask(self, asked: bytes, descriptors: list[int], timeout_s: float) -> int:
        """Have a command run with these as stdin, stdout and stderr; returns its wait status."""
        self._socket.settimeout(timeout_s)
        socket.send_fds(self._socket, [asked], descriptors)
        try:
            return int(self._socket.recv(100))
        except TimeoutError:
            self.close()
            _forking.cache_clear()
            raise

    def close(self) -> None:
        """End it, and what it has forked."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.kill()
        self._process.wait()


@functools.cache
def _forking() -> _Forking:
    return _Forking()


def _be_command(asked: bytes, descriptors: list[int]) -> None:
    """In the child: run the command, and end."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    code = 1
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        given = json.loads(asked)
        os.environ.clear()
        os.environ.update(given["environment"])
        os.chdir(given["directory"])
        code = importlib.import_module("headrace.cli.main").main(given["words"])
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Fork a command whenever one is asked for, and tell its wait status when it has ended."""
    for name in _PRELOADED:
        importlib.import_module(name)
    asking = socket.socket(fileno=int(sys.argv[1]))
    while True:
        asked, descriptors, *_ = socket.recv_fds(asking, _ASKED_BYTES_MAX, 3)
        if not asked:
            return
        child = os.fork()
        if not child:
            asking.close()
            _be_command(asked, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        asking.send(b"%d" % status)


if __name__ == "__main__":
    main()
