"""What becomes of a client in a forked child: it shares nothing with its parent's."""

import os
import socket
import weakref
from typing import Protocol

from headrace.model.errors import Forked

count = 0
"""How many forks lie between this process and the one that loaded this module."""


EMBEDDED = (
    "the embedded broker belongs to the process that this one was forked off; "
    "open it after the fork, or run `headrace serve` and connect to it from each process"
)
ASYNCIO = (
    "the connection belongs to an event loop of the process that this one was forked off; "
    "call headrace.connect_async in this process"
)


class Inherited(Protocol):
    """What a forked child gets a copy of and must not use as it is."""

    def _disown(self) -> None:
        """In a forked child: drop the parent's state, without sending, waiting or taking a lock."""


_inherited: "weakref.WeakSet[Inherited]" = weakref.WeakSet()


def register(inherited: Inherited) -> None:
    """Call `_disown` of this object in every forked child, for as long as the object lives."""
    _inherited.add(inherited)


def check(forks: int, what: str) -> None:
    """Raise Forked if there was a fork since `count` had this value."""
    if forks != count:
        raise Forked(f"{what} belongs to the process that this one was forked off; make a new one in this process")


def detach(descriptor: int) -> None:
    """Close the child's copy of a connection, and leave a dead one under its number for whoever still uses that."""
    dead, other = socket.socketpair()
    other.close()
    os.dup2(dead.fileno(), descriptor, inheritable=False)
    dead.close()


def _disown_all() -> None:
    global count
    count += 1
    for inherited in list(_inherited):
        inherited._disown()


os.register_at_fork(after_in_child=_disown_all)
