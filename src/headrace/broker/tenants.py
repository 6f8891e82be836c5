"""Requests about tenants: they are made, described, altered and deleted while the broker runs."""

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.services import ServiceRegistry
from headrace.broker.slices import TimedSteps
from headrace.broker.tenant_accounts import TenantAccounts
from headrace.broker.tenant_eraser import TenantEraser
from headrace.broker.tenant_meters import TenantMeters
from headrace.broker.turns import Turns
from headrace.model.errors import (
    Busy,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    TenantExists,
    TenantNotEmpty,
    TenantNotFound,
)
from headrace.model.limits import TENANTS_MAX
from headrace.model.request import AnswerType, Request, Resource, Verb
from headrace.model.requests import Done
from headrace.model.tenant import TenantQuotas, TenantUsage, altered_quotas, checked_description, merged_quotas
from headrace.model.tenant_requests import (
    TenantAlter,
    TenantCreate,
    TenantDelete,
    TenantDescribe,
    TenantInfo,
    TenantList,
    TenantsFound,
    TenantSummary,
    TenantUsageDescribe,
    TenantUsageFound,
)
from headrace.model.topic import DEFAULT_TENANT, checked_tenant
from headrace.security.definitions import DefinitionsChange, DefinitionsStore, SecurityDefinitions
from headrace.security.tenants import TenantDefinition

Handler = Callable[[Session, Any, memoryview, int], Any]

_LISTED_MAX = 1000
_ADMINISTER = Verb.ADMINISTER.value, Resource.SECURITY.value


class TenantRegistry:
    """The tenants of a broker. The default one is always there; others are made, or used without being made.

    When security is on, only tenants that were made can be used.
    """

    def __init__(
        self,
        store: DefinitionsStore,
        accounts: TenantAccounts,
        meters: TenantMeters,
        eraser: TenantEraser,
        services: ServiceRegistry,
        turns: Turns,
    ) -> None:
        self._store = store
        self._accounts = accounts
        self._meters = meters
        self._eraser = eraser
        self._services = services
        self._turns = turns
        self._apply(store.load())
        store.on_change(self._apply)

    def requests(self) -> dict[type[Request[Any]], Handler]:
        """What handles each request about tenants."""
        return {
            TenantCreate: lambda _, ask, __, now: self._create(ask, now),
            TenantList: lambda _, ask, __, ___: self._list(ask),
            TenantDescribe: lambda session, ask, _, __: self._describe(session, ask),
            TenantAlter: lambda _, ask, __, now: self._alter(ask, now),
            TenantDelete: lambda _, ask, __, now: self._delete(ask, now),
            TenantUsageDescribe: lambda session, ask, _, __: self._tell_usage(session, ask),
        }

    # Definitions.

    def _apply(self, document: SecurityDefinitions) -> None:
        """Make the definitions count for all that is done from now on."""
        accounts, tenants = self._accounts, document.tenants
        accounts.limits = {name: _limits(name, one, accounts.defaults) for name, one in tenants.items()}
        made = {name for name, one in tenants.items() if not one.deleting}
        accounts.deleting = tenants.keys() - made
        accounts.known = frozenset({*made, DEFAULT_TENANT}) if document.enabled else None
        accounts.shared = bool(made - {DEFAULT_TENANT})
        self._meters.refresh(self._turns.now_us)
        for tenant in accounts.deleting:
            self._eraser.begin(tenant)

    def _change(
        self, tenant: str, definition: TenantDefinition | None, now_us: int, answer: Callable[[], AnswerType]
    ) -> PendingAnswer[AnswerType]:
        pending: PendingAnswer[AnswerType] = PendingAnswer()

        def done(outcome: SecurityDefinitions | HeadraceError) -> None:
            pending.resolve(outcome if isinstance(outcome, HeadraceError) else answer())

        change = DefinitionsChange(tenants={tenant: definition})
        self._store.compare_and_set(change, self._store.load().version, now_us, done)
        return pending

    def _create(self, request: TenantCreate, now_us: int) -> Any:
        tenant = checked_tenant(request.tenant)
        known = self._store.load().tenants.get(tenant)
        if known is not None and known.deleting:
            raise Busy(f"the tenant {tenant} is being deleted; make it when that is done")
        if known is not None or tenant == DEFAULT_TENANT:
            if request.exist_ok:
                return self._info(tenant)
            raise TenantExists(f"there is already a tenant {tenant}; choose another name, or alter it")
        if len(self._store.load().tenants) >= TENANTS_MAX:
            raise LimitExceeded(f"there are {TENANTS_MAX} tenants, which is the maximum; delete some")
        definition = TenantDefinition(
            created_us=now_us,
            description=checked_description(request.description),
            quotas=altered_quotas(request.quotas),
        )
        return self._change(tenant, definition, now_us, lambda: self._known_info(tenant))

    def _alter(self, request: TenantAlter, now_us: int) -> PendingAnswer[TenantInfo]:
        tenant = checked_tenant(request.tenant)
        before = self._defined(tenant)
        description = before.description if request.description is None else checked_description(request.description)
        quotas = altered_quotas(request.quotas, before.quotas)
        after = msgspec.structs.replace(before, description=description, quotas=quotas)
        return self._change(tenant, after, now_us, lambda: self._known_info(tenant))

    def _delete(self, request: TenantDelete, now_us: int) -> PendingAnswer[Done]:
        tenant = checked_tenant(request.tenant)
        if tenant == DEFAULT_TENANT:
            raise InvalidArgument("the default tenant cannot be deleted: delete what it has")
        usage = self._accounts.usage(tenant)
        known = self._store.load().tenants.get(tenant)
        if known is None and tenant not in self._accounts.tenants():
            raise _not_found(tenant)
        done: PendingAnswer[Done] = PendingAnswer()
        if known is not None and known.deleting:
            self._eraser.begin(tenant).then(done.resolve)
            return done
        if usage != TenantUsage() and not request.cascade:
            held = {name: count for name, count in msgspec.structs.asdict(usage).items() if count}
            text = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in held.items())
            raise TenantNotEmpty(
                f"the tenant {tenant} has {text}: delete those first, or delete it with all that it has (--force)",
                usage=held,
            )
        marked = msgspec.structs.replace(known or TenantDefinition(), deleting=True)
        marking = self._change(tenant, marked, now_us, Done)  # from now on it cannot be used
        if isinstance(marking.outcome, HeadraceError):
            raise marking.outcome
        self._eraser.begin(tenant).then(done.resolve)
        return done

    # Answers.

    def _list(self, request: TenantList) -> TenantsFound:
        if request.limit < 1:
            raise InvalidArgument(f"limit must be 1 or more, not {request.limit}")
        tenants, accounts = self._store.load().tenants, self._accounts
        names = (
            {DEFAULT_TENANT, *tenants}
            if accounts.known is not None
            else {*tenants, DEFAULT_TENANT, *accounts.tenants()}
        )
        found = sorted(name for name in names - accounts.deleting if name > request.after)
        most = min(request.limit, _LISTED_MAX)
        summaries = []
        for name in found[:most]:
            one = tenants.get(name, TenantDefinition())
            counts = accounts.count(name, "topics"), accounts.count(name, "connections")
            summaries.append(TenantSummary(name, one.description, one.created_us, *counts))
        return TenantsFound(summaries, found[most - 1] if len(found) > most else "")

    def _describe(self, session: Session, request: TenantDescribe) -> PendingAnswer[TenantInfo]:
        return self._info(self._visible(session, request.tenant))

    def _tell_usage(self, session: Session, request: TenantUsageDescribe) -> PendingAnswer[TenantUsageFound]:
        tenant = self._visible(session, request.tenant)

        def steps() -> TimedSteps:
            usage = yield from self._measured(tenant)
            limits = self._accounts.limits_of(tenant)
            return TenantUsageFound(tenant, limits, usage, self._meters.throttled_us(tenant))

        return self._turns.in_slices(steps())

    def _info(self, tenant: str) -> PendingAnswer[TenantInfo]:
        def steps() -> TimedSteps:
            info = self._known_info(tenant)
            info.usage = yield from self._measured(tenant)
            return info

        return self._turns.in_slices(steps())

    def _known_info(self, tenant: str) -> TenantInfo:
        one = self._store.load().tenants.get(tenant, TenantDefinition())
        usage, limits = self._accounts.usage(tenant), self._accounts.limits_of(tenant)
        return TenantInfo(tenant, one.quotas, limits, usage, one.description, one.created_us)

    def _measured(self, tenant: str) -> Any:
        """What a tenant uses, with what has to be measured, in slices."""
        stored = yield from self._meters.stored_bytes(tenant)
        pending = yield from self._meters.pending_messages(tenant)
        usage = self._accounts.usage(tenant)
        usage.stored_bytes, usage.pending_messages = stored, pending
        usage.services = self._services.count(tenant)
        return usage

    # Who may.

    def _visible(self, session: Session, tenant: str) -> str:
        """The session's own tenant, or in a session of the default tenant any that there is."""
        tenant = checked_tenant(tenant or session.tenant)
        if tenant == session.tenant:
            return tenant
        access = session.access
        administers = session.names is None if access is None else access.allows(*_ADMINISTER)
        if not administers:
            raise TenantNotFound(
                f"there is no tenant {tenant} that you may see: leave the name out for your own, {session.tenant}"
            )
        self._defined(tenant)
        return tenant

    def _defined(self, tenant: str) -> TenantDefinition:
        """The definition of a tenant that was made, or an empty one of a tenant that is used."""
        known = self._store.load().tenants.get(tenant)
        if known is None and (tenant == DEFAULT_TENANT or tenant in self._accounts.tenants()):
            return TenantDefinition()
        if known is None or known.deleting:
            raise _not_found(tenant)
        return known


def _limits(tenant: str, definition: TenantDefinition, defaults: TenantQuotas) -> TenantQuotas:
    return definition.quotas if tenant == DEFAULT_TENANT else merged_quotas(definition.quotas, defaults)


def _not_found(tenant: str) -> TenantNotFound:
    return TenantNotFound(f"there is no tenant {tenant}; `headrace tenant list` shows those that there are")
