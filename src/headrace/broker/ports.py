"""What surrounds a broker: the threads that it runs on, and the sessions through which it is asked."""

from collections.abc import Callable
from typing import Any, Protocol

from headrace.broker.tenant_names import TenantNames
from headrace.model.identity import ANONYMOUS, Identity
from headrace.model.topic import DEFAULT_TENANT


class Ports(Protocol):
    """The world around a broker. All methods of a broker run on one thread, the broker's thread."""

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run a callback on the broker's thread, after all requests that have just arrived."""

    def call_at_turn_end(self, call: Callable[[], None]) -> None:
        """Run a callback on the broker's thread, after all callbacks given to `call_soon` and what they schedule."""

    def call_threadsafe(self, call: Callable[[], None]) -> None:
        """Run a callback on the broker's thread; may be called on any thread."""

    def background(self, job: Callable[[], None]) -> None:
        """Run a job on the background thread, one after the other: work on files that takes long."""

    def new_worker(self, name: str) -> "WorkerThread":
        """A thread of its own for jobs that may take long, or never end."""

    def wake_at(self, time_us: int) -> None:
        """Call the broker's `tick` at this time, if it is not called before."""


class WorkerThread(Protocol):
    """A thread that runs jobs one after the other."""

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job, which handles its own errors."""

    def dismiss(self) -> None:
        """End the thread after its jobs."""


class Session:
    """One client's connection to the broker: who it is, in which tenant, and how it came in."""

    def __init__(
        self,
        push: Callable[[Any], None],
        *,
        identity: Identity = ANONYMOUS,
        tenant: str = DEFAULT_TENANT,
        client: str = "",
        address: str = "",
        gateway: str = "",
        is_local: bool = False,
    ) -> None:
        self.push = push if tenant == DEFAULT_TENANT else self._push_translated
        """Sends what the broker tells unasked: an Answer, or an AnswerWithBody."""
        self._push = push
        self.blocked = False
        """Whether the client does not take what is sent as fast as it comes: nothing more is leased to it meanwhile."""
        self.identity = identity
        self.tenant = tenant
        """Names without a slash are this tenant's."""
        self.names = None if tenant == DEFAULT_TENANT else TenantNames(tenant)
        """Translates the names of requests and answers; None in the default tenant, where none need it."""
        self.client = client
        """What the client calls itself in lists and logs."""
        self.address = address
        """Where the client is, as text; empty if it is in this process."""
        self.gateway = gateway
        """The name of the gateway that the client came in through."""
        self.is_local = is_local
        """Whether the client can see the broker's files: it is in the same process or on the Unix socket."""
        self.memberships: set[tuple[str, str]] = set()
        """Groups and members that are reached through this session."""
        self.services: dict[tuple[str, str], Any] = {}
        """Instances of services that are registered through this session, by name and instance."""

    def _push_translated(self, pushed: Any) -> None:
        assert self.names is not None
        self._push(self.names.translated(pushed))
