"""What surrounds a broker: the threads that it runs on, and the sessions through which it is asked."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from headrace.broker.tenant_names import TenantNames
from headrace.model.errors import HeadraceError
from headrace.model.identity import ANONYMOUS, Identity
from headrace.model.tenant import TenantQuotas
from headrace.model.topic import DEFAULT_TENANT

if TYPE_CHECKING:
    from headrace.security.access import SessionAccess


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


class Meter(Protocol):
    """Meters what a session asks for and what it gets, by the rates of its tenant."""

    limits: TenantQuotas
    is_over: bool
    """Whether nothing more is to be delivered for now."""

    def ask(self, ask: Callable[..., Any], session: "Session", request: Any, body: memoryview, now_us: int) -> Any:
        """Have a request answered by calling `ask` with the rest, now or later; raises to refuse it."""

    def push(self, push: Callable[[Any], None], pushed: Any, now_us: Callable[[], int]) -> None:
        """Push something to a session, and count it."""

    def room(self, now_us: int) -> tuple[int, int]:
        """How many messages and bytes the next delivery should have at most."""

    def delivered(self, messages: int, size_bytes: int, now_us: int) -> None:
        """Count what a session got."""


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
        is_internal: bool = False,
        end: Callable[[HeadraceError], None] | None = None,
    ) -> None:
        self.push = push if tenant == DEFAULT_TENANT else self._push_translated
        """Sends what the broker tells unasked: an Answer, or an AnswerWithBody."""
        self._plain_push = self.push
        self._push = push
        self.meter: Meter | None = None
        """Meters its requests and deliveries; None: its tenant has no rates."""
        self.is_counted = True
        """Whether it counts among the connections of its tenant: not if it may do nothing there."""
        self.receives_slowly = False
        """Whether the client does not take what is sent as fast as it comes."""
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
        self.is_internal = is_internal
        """Whether it is the broker's own, for work that somebody was allowed to define, such as a webhook."""
        self.access: SessionAccess | None = None
        """Decides what the session may ask for; None while security is off."""
        self.end: Callable[[HeadraceError], None] = end or _ignore
        """Ends the session: the gateway tells its client why, closes what it has open, and disconnects."""
        self.memberships: set[tuple[str, str]] = set()
        """Groups and members that are reached through this session."""
        self.services: dict[tuple[str, str], Any] = {}
        """Instances of services that are registered through this session, by name and instance."""

    @property
    def turn_key(self) -> str:
        """Whose turns it has where tenants take turns: those who may do nothing in their tenant share one."""
        return self.tenant if self.is_counted else ""

    @property
    def counted_tenant(self) -> str | None:
        """The tenant whose things it may count; None: those of all tenants, in a session of the default one."""
        sees_all = self.access is None or self.access.describes_all_tenants
        return None if self.tenant == DEFAULT_TENANT and sees_all else self.tenant

    @property
    def blocked(self) -> bool:
        """Whether nothing more is leased to it for now: its client is slow, or its tenant is beyond its rate."""
        return self.receives_slowly or self.is_over_rate

    @property
    def is_over_rate(self) -> bool:
        """Whether nothing more is to be delivered to it for now, because of the rate of its tenant."""
        return self.meter is not None and self.meter.is_over

    def set_meter(self, meter: Meter | None, now_us: Callable[[], int]) -> None:
        """Meter its requests and deliveries from now on, or no longer."""
        self.meter = meter
        if meter is None:
            self.push = self._plain_push
        else:
            self.push = lambda pushed: meter.push(self._plain_push, pushed, now_us)

    def _push_translated(self, pushed: Any) -> None:
        assert self.names is not None
        self._push(self.names.translated(pushed))


def _ignore(_: HeadraceError) -> None:
    """End nothing: the session is one that only the broker's own process has."""
