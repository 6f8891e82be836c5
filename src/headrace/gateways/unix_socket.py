"""Creates and removes the files of Unix sockets."""

import contextlib
import os
import socket
import stat

from headrace.model.errors import InvalidArgument, LogInUse

PATH_BYTES_MAX = 107
"""The longest path of a Unix socket that the system takes."""
_PROBE_S = 1.0
_OWNER_ONLY = 0o600


def make_room(path: str) -> None:
    """Remove the file of a socket whose process has died."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise InvalidArgument(f"{path} exists and is no Unix socket: remove it, or give another path to listen on")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            remove(path)
            return
        except OSError as error:  # a process listens, even if it does not answer
            raise LogInUse(f"another process listens on {path} ({error}): end it, or give another path") from error
    raise LogInUse(f"another process listens on {path}: end it, or give another path")


def bind(path: str) -> socket.socket:
    """Bind a Unix socket to which its owner alone may connect, from the moment that its file exists."""
    bound = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(OSError):  # only Linux lets a socket have a mode before it has a file
            os.fchmod(bound.fileno(), _OWNER_ONLY)  # not by umask, which is that of all threads
        bound.bind(path)
        try:
            # Elsewhere, or where umask takes even the owner's: nobody can connect before it listens.
            if stat.S_IMODE(os.lstat(path).st_mode) != _OWNER_ONLY:
                os.chmod(path, _OWNER_ONLY)
        except BaseException:
            remove(path)
            raise
    except BaseException:
        bound.close()
        raise
    return bound


def remove(path: str) -> None:
    """Remove a socket's file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
