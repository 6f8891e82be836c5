"""The places where a bus finds its broker: the addresses given, those learned, and the node that served last.

Decides which address is dialled next, and for how long; does no I/O itself.
"""

import logging
import random

from headrace.client.connection.addresses import Address, Target, place_of, unreachable
from headrace.client.connection.redirects import fitting_addresses, security_of
from headrace.model.arguments import shortened
from headrace.model.errors import ConnectionFailed, Draining, HeadraceError, NotServing, TlsFailed

logger = logging.getLogger("headrace.client")

DIAL_TIMEOUT_S = 10.0
"""How long the only address of a broker has to answer."""
FIRST_DIAL_TIMEOUT_S = 1.0
"""How long one of several addresses has; twice as long in each next attempt, until one answers."""
CLUSTER_BACKOFF_S = 0.5
"""The longest pause between attempts to find the node that serves."""
ROLE_CHANGE_S = 3.0
"""For so long a new client waits for a cluster whose nodes all refuse connections, as one does when it takes over."""
_REDIRECTS_MAX = 8
"""How many redirects an attempt follows."""
_TOLD_MAX = 3
"""How many failures an error tells."""


class Endpoints:
    """What the connections of a bus share. Any thread may call any method: each only replaces references."""

    def __init__(self, target: Target, *, has_token: bool = False) -> None:
        self.target = target
        self._given: list[Target] = [*target.each()] if isinstance(target, Address) else [target]
        self._has_token = has_token
        self._learned: list[Target] = []
        self._owner: Target | None = None
        """The node that served last, or was said to serve."""
        self._dial_timeout_s = FIRST_DIAL_TIMEOUT_S
        self._is_cluster = len(self._given) > 1

    @property
    def is_cluster(self) -> bool:
        """Whether the broker is known to be one of several nodes."""
        return self._is_cluster

    def attempt(self, timeout: float) -> "DialAttempt":
        """Begin an attempt to connect: the last owner first, then those given and those learned, each by chance."""
        given, learned = list(self._given), list(self._learned)
        random.shuffle(given)
        random.shuffle(learned)
        owner = [] if self._owner is None else [self._owner]
        return DialAttempt(self, list(dict.fromkeys([*owner, *given, *learned])), timeout)

    def dial_timeout_s(self, several: bool, timeout: float) -> float:
        """How long an address has to answer."""
        return min(timeout, self._dial_timeout_s if several else DIAL_TIMEOUT_S)

    def served(self, target: Target, nodes: list[str]) -> None:
        """Remember a node that serves, and the nodes that it tells of."""
        self._owner = target
        self._dial_timeout_s = FIRST_DIAL_TIMEOUT_S
        if nodes:
            self._is_cluster = True
            self._learned = list(self._fitting(nodes))

    def redirected(self, target: Target, error: NotServing) -> list[Address]:
        """Learn from a node that does not serve which one does; returns the addresses of that."""
        self._is_cluster = True
        self.forget(target)
        urls = error.details.get("addresses") or error.details.get("address")
        named = self._fitting([urls] if isinstance(urls, str) else urls)
        if named:
            self._owner = named[0]
        elif urls:
            logger.warning(
                "redirect ignored, as no address of it has %s: %s",
                security_of(self.target) if isinstance(self.target, Address) else "a host",
                shortened(urls),
            )
        return named

    def forget(self, target: Target) -> None:
        """Dial another address first from now on, if this one was to be."""
        if self._owner == target:
            self._owner = None

    def slow(self) -> None:
        """Give each address more time in the next attempt."""
        self._dial_timeout_s = min(2 * self._dial_timeout_s, DIAL_TIMEOUT_S)

    def pause_s(self, wait_s: float) -> float:
        """Shorten the pause before an attempt where another node may serve in a moment."""
        return min(wait_s, CLUSTER_BACKOFF_S) if self._is_cluster else wait_s

    def patience_s(self, error: HeadraceError, timeout: float) -> float:
        """For how long a new client tries again after such an error, even if it was not told to wait."""
        if isinstance(error, NotServing) or (isinstance(error, Draining) and self._is_cluster):
            return timeout
        return min(timeout, ROLE_CHANGE_S) if isinstance(error, ConnectionFailed) and self._is_cluster else 0.0

    def _fitting(self, urls: object) -> list[Address]:
        given = self.target
        return fitting_addresses(given, urls, has_token=self._has_token) if isinstance(given, Address) else []


class DialAttempt:
    """One attempt to find a node that serves. It dials each address once at most, so redirects cannot go in circles."""

    def __init__(self, endpoints: Endpoints, targets: list[Target], timeout: float) -> None:
        self._endpoints = endpoints
        self._left = targets
        self._several = len(targets) > 1
        self._timeout = timeout
        self._dialled: set[Target] = set()
        self._redirects = 0
        self._errors: list[HeadraceError] = []

    def next(self) -> tuple[Target, float] | None:
        """The address to dial now, and how long it has; None if all have failed."""
        while self._left:
            target = self._left.pop(0)
            if target not in self._dialled:
                self._dialled.add(target)
                return target, self._endpoints.dial_timeout_s(self._several, self._timeout)
        if not self._told_by_nodes():  # those that answered were quick enough
            self._endpoints.slow()
        return None

    def served(self, target: Target, nodes: list[str]) -> None:
        """The address is that of a node which serves."""
        self._endpoints.served(target, nodes)

    def failed(self, target: Target, error: HeadraceError) -> None:
        """The address does not serve; if it names one that does, that is dialled next."""
        self._errors.append(error)
        if not isinstance(error, NotServing):
            self._endpoints.forget(target)
            return
        self._several = True
        if self._redirects < _REDIRECTS_MAX:
            self._redirects += 1
            self._left[:0] = self._endpoints.redirected(target, error)

    def error(self) -> HeadraceError:
        """What to tell about an attempt that has failed."""
        told = self._told_by_nodes() or [
            error for error in self._errors if isinstance(error, TlsFailed) or not isinstance(error, ConnectionFailed)
        ]
        if told:
            return told[0]
        if len(self._errors) == 1:
            return self._errors[0]
        texts = [str(error) for error in self._errors[:_TOLD_MAX]]
        texts += [f"and {len(self._errors) - _TOLD_MAX} more"] if len(self._errors) > _TOLD_MAX else []
        return ConnectionFailed(f"no node of {place_of(self._endpoints.target)} can be reached: {'; '.join(texts)}")

    def _told_by_nodes(self) -> list[HeadraceError]:
        """What nodes said that do not serve now, but may in a moment."""
        return [error for error in self._errors if isinstance(error, NotServing | Draining)]


def not_served(target: Target, error: HeadraceError) -> HeadraceError:
    """The error of a client that found no node which serves in time."""
    return ConnectionFailed(unreachable(target, error)) if isinstance(error, NotServing) else error
