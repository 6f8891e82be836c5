"""Registered services: live instances in memory, kept alive by their sessions, and the policy who may use the bus."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from headrace.broker.deadlines import Deadlines
from headrace.broker.facts import ServicePolicySet
from headrace.broker.ledger import Ledger
from headrace.broker.live_instance import LiveInstance, definition_bytes
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports, Session
from headrace.broker.service_discovery import describe_service, list_services
from headrace.broker.service_errors import ServiceErrorLog
from headrace.broker.signal import Signal, TakenShare
from headrace.broker.slices import Steps, in_slices
from headrace.broker.streams import OpenedReading
from headrace.broker.subject_trie import SubjectTrie
from headrace.broker.switchboard import parse_pattern
from headrace.model.bus_event import EVENTS_SUBJECT
from headrace.model.errors import InvalidArgument, LimitExceeded, NotRegistered, ServiceNotFound
from headrace.model.limits import (
    SERVICE_BYTES_MAX,
    SERVICE_INSTANCES_MAX,
    SERVICE_TTL_MS_MAX,
    SERVICE_TTL_MS_MIN,
    SERVICE_VERSION_CHARS_MAX,
    SERVICES_BYTES_MAX,
    SERVICES_TENANT_BYTES_MAX,
)
from headrace.model.request import Request, Verb
from headrace.model.requests import Done
from headrace.model.service_requests import (
    ServiceDefinition,
    ServiceDeregister,
    ServiceDescribe,
    ServiceInfo,
    ServiceList,
    ServicePolicy,
    ServicePolicyAlter,
    ServiceRegister,
    ServiceRegistered,
    ServicesFound,
)
from headrace.model.topic import (
    SYSTEM_PREFIX,
    checked_plain_name,
    checked_tenant_name,
    parse_topic,
    tenant_of,
)

_ENDED_TOGETHER = 100
"""Streams, leases and the like of the unregistered that are ended per slice."""
_EXPIRED_TOGETHER = 100
"""Maximum instances that expire per tick."""

_ALWAYS_ADMITTED = frozenset({ServiceRegister, ServiceDeregister})
"""Requests that a client which is not registered may send, whatever their permissions say."""
_ADMITTED_VERBS = frozenset({Verb.DESCRIBE, Verb.ADMINISTER})
"""What those may do that are not registered: look, and administer."""
_ADMITTED_LOCAL_VERBS = _ADMITTED_VERBS | {Verb.CREATE, Verb.ALTER, Verb.DELETE}
"""What they may do besides on the broker's machine, so that no policy locks its administrator out."""

Key = tuple[str, str]
"""A service's name, with its tenant, and an instance of it."""


class ServiceRegistry:
    """All registered instances, by service; and each tenant's policy."""

    def __init__(self, ledger: Ledger, ports: Ports, errors: ServiceErrorLog) -> None:
        self._ledger = ledger
        self._ports = ports
        self._errors = errors
        self.changed: Signal[LiveInstance, str, int] = Signal()
        """An instance was `registered`, `altered` or `deregistered`, or has `expired`, with the time."""
        self.policy_changed: Signal[str, bool, int] = Signal()
        """A tenant's policy was changed: the tenant, whether it requires registration, and the time."""
        self.taking: Signal[TakenShare] = Signal()
        """Emitted before a tenant takes more of what the broker has for all; a listener refuses by raising."""
        self._openings: list[Callable[[], Iterable[OpenedReading]]] = []
        self._services: dict[str, dict[str, LiveInstance]] = {}
        """By name and instance."""
        self._by_client: dict[tuple[str, str], LiveInstance] = {}
        """The instance that registered last, by tenant and client."""
        self._count = 0
        self._tenant_counts: Counter[str] = Counter()
        self._bytes = 0
        self._tenant_bytes: dict[str, int] = {}
        """What all instances say of themselves, and those of each tenant."""
        self._deadlines = Deadlines[Key]()
        self.restricted = set(ledger.state.service_policies)
        """Tenants that require registration. Requests look only whether there is any."""

    # Admission.

    def check(self, session: Session, request: Request[Any]) -> None:
        """Refuse what a session asks for that is no registered service of a tenant that requires it."""
        refusal = self.refusal(session, request)
        if refusal is not None:
            raise refusal

    def refusal(self, session: Session, request: Request[Any]) -> NotRegistered | None:
        """Why a session may not ask for this; None if it may."""
        is_admitted = session.services or session.is_internal or session.tenant not in self.restricted
        if is_admitted or _is_exempt(session, request):
            return None
        return NotRegistered(
            f"the tenant {session.tenant} admits registered services only, and {session.client or 'this client'} is "
            "none: register it (bus.services.register, or App(service=...)), or let an administrator run `headrace "
            "service policy --require-registration off`"
        )

    def alter_policy(self, session: Session, request: ServicePolicyAlter, now_us: int) -> PendingAnswer[ServicePolicy]:
        """Set the policy of the session's tenant."""
        wanted, tenant = request.require_registration, session.tenant
        if wanted is not (tenant in self.restricted):
            self._ledger.record(now_us, ServicePolicySet(tenant, wanted))
            (self.restricted.add if wanted else self.restricted.discard)(tenant)
            self.policy_changed(tenant, wanted, now_us)
            if wanted:
                self._end_unregistered(tenant)
        return self._ledger.durably(ServicePolicy(wanted))

    def add_openings(self, *openings: Callable[[], Iterable[OpenedReading]]) -> None:
        """Add callables that tell what sessions have open; it ends when those may not use the bus any more."""
        self._openings += openings

    def _end_unregistered(self, tenant: str) -> None:
        """End what sessions of a tenant have open that may not use the bus any more, in slices."""
        opened = [one for opening in self._openings for one in opening() if one[0].tenant == tenant]

        def steps() -> Steps:
            for number, (session, request, end) in enumerate(opened, 1):
                refusal = self.refusal(session, request)
                if refusal is not None:
                    end(refusal)
                if number % _ENDED_TOGETHER == 0:
                    yield

        in_slices(self._ports, steps())

    # Instances.

    def register(self, session: Session, request: ServiceRegister, now_us: int) -> ServiceRegistered:
        """Register an instance, or attach another session to one."""
        definition = _checked(request)
        if session.access is not None:
            for topic in definition.consumes:
                session.access.require_reading(topic)
        key = definition.name, definition.instance
        ttl_us = request.ttl_ms * 1000
        known = self._services.get(definition.name, {}).get(definition.instance)
        if known is not None:
            _check_identity(known, session)
        if known is None:
            if self._count >= SERVICE_INSTANCES_MAX:
                raise LimitExceeded(
                    f"there are {SERVICE_INSTANCES_MAX} registered instances of services, which is the maximum; "
                    "deregister some"
                )
            counts = self._tenant_counts[session.tenant], self._count, SERVICE_INSTANCES_MAX
            self.taking(TakenShare(session.tenant, "registered_instances", *counts))
            known = LiveInstance(definition, session, ttl_us, now_us)
            self._check_room(definition.name, known.size_bytes)
            self._add(known, now_us, "registered")
        else:
            size_bytes = definition_bytes(definition)
            self._check_room(definition.name, size_bytes - known.size_bytes)
            known.sessions.add(session)
            self._forget_client(known)
            known.client, known.ttl_us = session.client, ttl_us
            if known.definition != definition:
                self._count_bytes(definition.name, size_bytes - known.size_bytes)
                known.definition, known.size_bytes = definition, size_bytes
                self.changed(known, "altered", now_us)
        session.services[key] = known
        self._by_client[session.tenant, session.client] = known
        self._see(known, now_us)
        return ServiceRegistered(request.ttl_ms)

    def deregister(self, session: Session, request: ServiceDeregister, now_us: int) -> Done:
        """Forget an instance that the session has registered, or another one of its identity."""
        name = checked_tenant_name(request.name, "service")
        known = session.services.get((name, request.instance))
        if known is None and request.any_session:
            known = self._services.get(name, {}).get(request.instance)
            if known is not None:
                _check_identity(known, session)
        if known is not None:
            for each in list(known.sessions):
                each.services.pop(known.key, None)
            known.sessions.clear()
            session.services.pop(known.key, None)
            if self._is_live(known):
                self._remove(known, now_us, "deregistered")
            if session.tenant in self.restricted:
                self._end_unregistered(session.tenant)
        return Done()

    def touch(self, session: Session, now_us: int) -> None:
        """Take a sign of life of a session; an instance that had expired meanwhile is registered again."""
        for key, known in list(session.services.items()):
            if self._is_live(known):
                self._see(known, now_us)
            elif self._services.get(key[0], {}).get(key[1]) is None and self._takes(known):
                known.registered_us = now_us
                known.sessions.add(session)
                self._add(known, now_us, "registered")
                self._see(known, now_us)

    def share(self, session: Session, other: Session) -> None:
        """Attach another session of the same client to the instances that a session has registered."""
        for key, known in session.services.items():
            other.services[key] = known
            known.sessions.add(other)

    def disconnect(self, session: Session) -> None:
        """Detach a closed session from its instances, which stay until their time to live is over."""
        for known in session.services.values():
            known.sessions.discard(session)
        session.services.clear()

    def tick(self, now_us: int) -> None:
        """Forget instances that gave no sign of life for their time to live."""
        for name, instance in self._deadlines.pop_due(now_us, _EXPIRED_TOGETHER):
            known = self._services.get(name, {}).get(instance)
            if known is not None:
                self._remove(known, now_us, "expired")

    def next_tick_us(self) -> int | None:
        """When the next instance may expire."""
        return self._deadlines.next_us()

    def count(self, tenant: str | None) -> int:
        """How many instances are registered, of a tenant or of all."""
        return self._count if tenant is None else self._tenant_counts[tenant]

    def forget_tenant(self, tenant: str, now_us: int) -> None:
        """Forget the instances of a tenant that was deleted."""
        for known in [one for each in self._services.values() for one in each.values()]:
            if tenant_of(known.key[0]) == tenant:
                self._remove(known, now_us, "deregistered")

    def service_of(self, tenant: str, client: str) -> LiveInstance | None:
        """The instance that a client has registered."""
        return self._by_client.get((tenant, client))

    def _check_room(self, name: str, size_bytes: int) -> None:
        tenant = tenant_of(name)
        if size_bytes > 0 and not self._has_room(name, size_bytes):
            raise LimitExceeded(
                f"the services of the tenant {tenant} say {self._tenant_bytes.get(tenant, 0)} bytes of themselves, and "
                f"{SERVICES_TENANT_BYTES_MAX} are the most, {SERVICES_BYTES_MAX} of all tenants together: deregister "
                "some, or leave out metadata and schemas"
            )

    def _has_room(self, name: str, size_bytes: int) -> bool:
        """Whether instances of a service may say so much more of themselves."""
        tenant_bytes = self._tenant_bytes.get(tenant_of(name), 0) + size_bytes
        return tenant_bytes <= SERVICES_TENANT_BYTES_MAX and self._bytes + size_bytes <= SERVICES_BYTES_MAX

    def _takes(self, known: LiveInstance) -> bool:
        """Whether there is room for one more instance."""
        return self._count < SERVICE_INSTANCES_MAX and self._has_room(known.key[0], known.size_bytes)

    def _count_bytes(self, name: str, size_bytes: int) -> None:
        tenant = tenant_of(name)
        self._bytes += size_bytes
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + size_bytes
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant]

    def _see(self, known: LiveInstance, now_us: int) -> None:
        known.seen_us = now_us
        self._deadlines.set(known.key, now_us + known.ttl_us)

    def _is_live(self, known: LiveInstance) -> bool:
        name, instance = known.key
        return self._services.get(name, {}).get(instance) is known

    def _add(self, known: LiveInstance, now_us: int, action: str) -> None:
        name, instance = known.key
        self._services.setdefault(name, {})[instance] = known
        self._count += 1
        self._tenant_counts[tenant_of(name)] += 1
        self._count_bytes(name, known.size_bytes)
        self._by_client[tenant_of(name), known.client] = known
        self.changed(known, action, now_us)

    def _remove(self, known: LiveInstance, now_us: int, action: str) -> None:
        name, instance = known.key
        others = self._services[name]
        del others[instance]
        if not others:
            del self._services[name]
        self._count -= 1
        self._tenant_counts[tenant_of(name)] -= 1
        if not self._tenant_counts[tenant_of(name)]:
            del self._tenant_counts[tenant_of(name)]
        self._count_bytes(name, -known.size_bytes)
        self._deadlines.remove(known.key)
        self._forget_client(known)
        self.changed(known, action, now_us)

    def _forget_client(self, known: LiveInstance) -> None:
        client = tenant_of(known.key[0]), known.client
        if self._by_client.get(client) is known:
            del self._by_client[client]

    # Discovery.

    def listed(self, session: Session, request: ServiceList) -> PendingAnswer[ServicesFound]:
        """List the services of the session's tenant that match, by name, in pages."""
        names = [request.name] if request.name else sorted(name for name in self._services if name > request.after)
        names = [name for name in names if tenant_of(name) == session.tenant]

        def steps() -> Steps:
            found = yield from list_services(self._services, names, request)
            for info in found.services:
                info.errors = self._errors.total(info.name)
            found.require_registration = session.tenant in self.restricted
            return found

        return in_slices(self._ports, steps())

    def describe(self, request: ServiceDescribe) -> PendingAnswer[ServiceInfo]:
        """Describe a service."""
        name = checked_tenant_name(request.name, "service")
        instances = self._services.get(name)
        if not instances:
            raise ServiceNotFound(
                f"no instance of the service {name} is registered; `headrace service list` shows those that are"
            )
        lives = list(instances.values())

        def steps() -> Steps:
            info = yield from describe_service(name, lives)
            info.errors = self._errors.total(name)
            return info

        return in_slices(self._ports, steps())


def _check_identity(known: LiveInstance, session: Session) -> None:
    """Refuse a session that has another identity than the one which registered an instance."""
    if known.identity.name != session.identity.name:
        name, instance = known.key
        raise InvalidArgument(
            f"the instance {instance} of the service {name} is registered by {known.identity.name}; use another "
            "instance id"
        )


def _is_exempt(session: Session, request: Request[Any]) -> bool:
    """Whether a request is open to those who are not registered."""
    if type(request) in _ALWAYS_ADMITTED:
        return True
    verbs = _ADMITTED_LOCAL_VERBS if session.is_local else _ADMITTED_VERBS
    for permission in request.declared.permissions:
        if permission.verb in verbs:
            continue
        names = [name.rpartition("/")[2] for name, *_ in permission.names(request)]
        if "." in permission.field and not names:
            continue  # about something that the request may name, and does not
        is_reading = permission.verb is Verb.CONSUME and session.is_local
        if not (is_reading and names and all(name.startswith((SYSTEM_PREFIX, EVENTS_SUBJECT)) for name in names)):
            return False
    return not getattr(request, "create", False)  # looking creates nothing; whoever may, says so with another request


def _checked(request: ServiceRegister) -> ServiceDefinition:
    """The definition with full names, if it is within the limits."""
    given = request.definition
    if not SERVICE_TTL_MS_MIN <= request.ttl_ms <= SERVICE_TTL_MS_MAX:
        raise InvalidArgument(
            f"ttl_ms must be {SERVICE_TTL_MS_MIN} to {SERVICE_TTL_MS_MAX} milliseconds, not {request.ttl_ms}"
        )
    definition = msgspec.structs.replace(
        given,
        name=checked_tenant_name(given.name, "service"),
        instance=checked_plain_name(given.instance, "service instance"),
        produces=[str(parse_topic(topic)) for topic in given.produces],
        consumes=[str(parse_topic(topic)) for topic in given.consumes],
        serves=[str(parse_pattern(pattern)) for pattern in given.serves],
    )
    patterns = SubjectTrie[str]()
    for pattern in definition.serves:
        patterns.add(parse_pattern(pattern).subject, pattern)
    if len(given.version) > SERVICE_VERSION_CHARS_MAX:
        raise InvalidArgument(f"a version has up to {SERVICE_VERSION_CHARS_MAX} characters, not {len(given.version)}")
    size_bytes = definition_bytes(definition)
    if size_bytes > SERVICE_BYTES_MAX:
        raise InvalidArgument(
            f"the service {given.name} says {size_bytes} bytes of itself, and {SERVICE_BYTES_MAX} are the most: leave "
            "out some metadata or schemas"
        )
    return definition
