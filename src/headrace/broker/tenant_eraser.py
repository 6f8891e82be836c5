"""Deletes a tenant with all that it has, in slices; after a crash the deletion goes on at the next start."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from headrace.broker.facts import TenantErased
from headrace.broker.group_coordinator import GroupCoordinator
from headrace.broker.ledger import Ledger
from headrace.broker.observability import Observability
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.routes import RouteRegistry
from headrace.broker.schedules import ScheduleRunner
from headrace.broker.slices import TimedSteps
from headrace.broker.tenant_accounts import TenantAccounts
from headrace.broker.topics import TopicRegistry
from headrace.broker.transactions import Transactions
from headrace.broker.turns import Turns
from headrace.broker.webhooks import WebhookRegistry
from headrace.model.errors import HeadraceError, TenantNotFound, VersionConflict
from headrace.model.requests import Done
from headrace.model.route_requests import RouteRemove
from headrace.model.schedule_requests import ScheduleRemove
from headrace.model.tenant import TenantUsage
from headrace.security.definitions import DefinitionsChange, DefinitionsStore, SecurityDefinitions

logger = logging.getLogger("headrace.broker")

_REMOVED_TOGETHER = 8
"""Topics, groups and the like that are deleted per slice."""
_RETRY_US = 1_000_000


class ErasedParts(NamedTuple):
    """The components that have something of a tenant."""

    topics: TopicRegistry
    groups: GroupCoordinator
    transactions: Transactions
    schedules: ScheduleRunner
    routes: RouteRegistry
    webhooks: WebhookRegistry
    observability: Observability


class TenantEraser:
    """Deletes tenants that are marked as being deleted. Each step can be repeated."""

    def __init__(
        self,
        store: DefinitionsStore,
        accounts: TenantAccounts,
        parts: ErasedParts,
        ledger: Ledger,
        turns: Turns,
        sessions: Iterable[Session],
        end_session: Callable[[Session, HeadraceError], None],
    ) -> None:
        self._store = store
        self._accounts = accounts
        self._parts = parts
        self._ledger = ledger
        self._turns = turns
        self._sessions = sessions
        self._end_session = end_session
        self._running: dict[str, PendingAnswer[Done]] = {}
        self._retry_us: dict[str, int] = {}
        """When to try again what failed, by tenant."""

    def begin(self, tenant: str) -> PendingAnswer[Done]:
        """Delete a tenant; resolves when nothing is left of it, or with the error that the deletion has met."""
        running = self._running.get(tenant)
        if running is None:
            running = self._running[tenant] = PendingAnswer()
            self._retry_us.pop(tenant, None)
            running.then(lambda outcome: self._ended(tenant, outcome))
            self._parts.observability.begin_erasing(tenant)
            self._end_sessions(tenant)
            self._turns.in_slices(self._erase(tenant)).then(running.resolve)
        return running

    def tick(self, now_us: int) -> None:
        """Try again what failed."""
        for tenant, retry_us in list(self._retry_us.items()):
            if now_us >= retry_us:
                self.begin(tenant)

    def _ended(self, tenant: str, outcome: Done | HeadraceError) -> None:
        self._running.pop(tenant, None)
        if isinstance(outcome, HeadraceError):
            self._retry_us[tenant] = self._turns.now_us + _RETRY_US
            text = "tenant not deleted yet; trying again  tenant=%s"
            self._ledger.failures.note(("tenant", tenant), outcome, text, tenant)
        else:
            self._parts.observability.end_erasing(tenant)
            self._ledger.failures.worked(("tenant", tenant))
            logger.info("tenant deleted  tenant=%s", tenant)

    def _end_sessions(self, tenant: str) -> None:
        gone = TenantNotFound(f"the tenant {tenant} was deleted, and with it this session")
        # Those of webhooks end with their webhooks, which settle what they have leased.
        for session in [one for one in self._sessions if one.tenant == tenant and not one.is_internal]:
            self._end_session(session, gone)

    def _erase(self, tenant: str) -> TimedSteps:
        now_us = yield  # after the request, or the start, that began it
        while True:
            for number, remove in enumerate(self._removals(tenant), 1):
                remove(now_us)
                if not number % _REMOVED_TOGETHER:
                    now_us = yield
            unsettled = self._ledger.state.unsettled.values()
            is_settled = not any(commit.transaction.startswith(f"{tenant}/") for commit in unsettled)
            if self._accounts.usage(tenant) == TenantUsage() and is_settled:
                break
            now_us = yield  # a session is closed, or a commit is applied, in a turn of its own
        self._parts.observability.forget_tenant(tenant, now_us)
        self._ledger.record(now_us, TenantErased(tenant))
        return self._undefine(tenant, now_us)

    def _removals(self, tenant: str) -> Iterator[Callable[[int], object]]:
        """What deletes each thing of a tenant: first what makes other things."""
        parts, prefix = self._parts, f"{tenant}/"

        def own(names: Iterable[str]) -> list[str]:
            return [name for name in names if name.startswith(prefix)]

        for name in own(parts.schedules.names()):
            yield partial(parts.schedules.remove, ScheduleRemove(name))
        for name in own(parts.routes.names()):
            yield partial(parts.routes.remove, RouteRemove(name))
        for name in own(stored.definition.name for stored in parts.webhooks.stored()):
            yield partial(parts.webhooks.remove, name, "its tenant was deleted")
        for name in own(name for name, _ in parts.transactions.opened()):
            yield partial(parts.transactions.abandon, name)
        for name in own(parts.groups.names()):
            yield partial(parts.groups.remove, name)
        mine = [topic for topic in parts.topics if topic.name.tenant == tenant]
        for topic in sorted(mine, key=lambda topic: not topic.is_view):  # views before their sources
            yield partial(parts.topics.delete, str(topic))

    def _undefine(self, tenant: str, now_us: int) -> PendingAnswer[Done]:
        """Remove the definition, and with it the roles and tokens of this tenant alone."""
        done: PendingAnswer[Done] = PendingAnswer()
        document = self._store.load()
        change = DefinitionsChange(
            tenants={tenant: None},
            unbound=[binding for binding in document.bindings if binding.tenant == tenant],
            tokens={name: None for name, token in document.tokens.items() if token.tenant == tenant},
        )

        def changed(outcome: SecurityDefinitions | HeadraceError) -> None:
            if isinstance(outcome, VersionConflict) and self._store.load().version != document.version:
                self._undefine(tenant, now_us).then(done.resolve)  # another change was first, in a cluster
                return
            done.resolve(outcome if isinstance(outcome, HeadraceError) else Done())

        self._store.compare_and_set(change, document.version, now_us, changed)
        return done
