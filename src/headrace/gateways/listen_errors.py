"""Errors about addresses on which a broker cannot listen, with what to do about them."""

import contextlib
import errno
import os
import socket

from headrace.model.errors import ListenFailed, TooManyFiles

_COMMAND_CHARS_MAX = 80
_LISTENS = "0A"


def listen_failed(error: OSError, host: str, port: int) -> ListenFailed | TooManyFiles:
    """Make an error of the system's refusal to listen on TCP."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return TooManyFiles(f"cannot listen on {where}: {error.strerror}; raise the limit on open files (ulimit -n)")
    if isinstance(error, socket.gaierror):
        why = f"there is no host {host!r} ({error.strerror}); give one of this machine with --host or --listen"
    elif error.errno == errno.EADDRINUSE:
        why = f"it is in use by {_user(port)}; end that, or take another with --port or --listen (0: any free one)"
    elif error.errno == errno.EADDRNOTAVAIL:
        why = f"{host} is no address of this machine; give one that is with --host or --listen, such as 127.0.0.1"
    elif error.errno in (errno.EACCES, errno.EPERM):
        why = "the system does not allow it; ports below 1024 are for root: take another with --port or --listen"
    else:
        why = error.strerror or str(error)
    return ListenFailed(f"cannot listen on {where}: {why}", host=host, port=port)


def listen_unix_failed(error: OSError, path: str) -> ListenFailed | TooManyFiles:
    """Make an error of the system's refusal to listen on a Unix socket."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return TooManyFiles(f"cannot listen on {path}: {error.strerror}; raise the limit on open files (ulimit -n)")
    directory = os.path.dirname(path) or "."
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        why = f"there is no directory {directory}; make it, or give another path with --unix-socket or --listen"
    else:
        why = f"{os.strerror(error.errno) if error.errno else error}; give another path with --unix-socket or --listen"
    return ListenFailed(f"cannot listen on {path}: {why}", path=path)


def _user(port: int) -> str:
    """Find the process that listens on a port, as far as the system tells."""
    inodes = _inodes(port)
    for pid in filter(str.isdigit, os.listdir("/proc") if inodes else ()):
        with contextlib.suppress(OSError):  # a process that has ended, or is another user's
            for name in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{name}") in inodes:
                    return f"process {pid}{_command(pid)}"
    return "another process"


def _inodes(port: int) -> set[str]:
    """Find the sockets that listen on a port, as /proc names them, on a system that has it."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            for line in list(file)[1:]:
                words = line.split()
                if words[3] == _LISTENS and words[1].endswith(f":{port:04X}"):
                    found.add(f"socket:[{words[9]}]")
    return found


def _command(pid: str) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().replace(b"\0", b" ").decode("utf-8", "backslashreplace").strip()
    short = words if len(words) <= _COMMAND_CHARS_MAX else f"{words[:_COMMAND_CHARS_MAX]}..."
    return f" ({short})" if short.isprintable() and short else ""
