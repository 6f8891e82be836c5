"""Access of sessions: compiled from the security definitions when a session opens, and again when they change.

A change applies to what is open: sessions whose token was revoked or has expired end, and so do streams, leases, live
subscriptions and responders that their identity may not have any more.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from headrace.broker.deadlines import Deadlines
from headrace.broker.definition_facts import TokensUsed
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports, Session
from headrace.broker.slices import Steps, in_slices
from headrace.broker.streams import OpenedReading
from headrace.model.errors import Forbidden, HeadraceError, LimitExceeded, NotAuthenticated, TokenExpired, TokenRevoked
from headrace.model.identity import ANONYMOUS, RESERVED_NAMES
from headrace.security.access import RefusedAccess, SessionAccess
from headrace.security.authorizer import Authorizer, BindingIndex
from headrace.security.definitions import DefinitionsStore, SecurityDefinitions
from headrace.security.tokens import check_usable

logger = logging.getLogger("headrace.security")

Handler = Callable[[Session, Any, memoryview, int], Any]

_TOGETHER = 100
"""Sessions, or things that they have open, that are looked at per slice after a change."""
_ENDED_TOGETHER = 100
"""Sessions that end per tick because their time is over; ticks come every second."""
_SHARED_MAX = 1000
"""Compiled accesses that sessions of the same identity share."""
_USED_FLUSH_US = 300_000_000
"""The last uses of tokens are recorded this often."""


class AccessControl:
    """Gives sessions their access, and takes it away."""

    def __init__(
        self,
        store: DefinitionsStore,
        ledger: Ledger,
        ports: Ports,
        sessions: set[Session],
        per_identity_max: int,
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._ports = ports
        self._sessions = sessions
        self._per_identity_max = per_identity_max
        self._by_identity: dict[str, int] = {}
        """How many sessions each identity has."""
        self._openings: list[Callable[[], Iterable[OpenedReading]]] = []
        self._index: BindingIndex | None = None
        self._shared: dict[tuple[object, ...], SessionAccess] = {}
        """By identity without claims, and tenant."""
        self._expiring = Deadlines[int]()
        self._by_number: dict[int, Session] = {}
        self._used_us: dict[str, int] = {}
        """Uses of tokens that are not recorded yet."""
        self._flush_us: int | None = None
        self._answering: dict[Session, PendingAnswer[Any]] = {}
        """Answers to changes of the definitions that are to come, by the session that asked for the change."""
        store.on_change(self._changed)

    def add_openings(self, *openings: Callable[[], Iterable[OpenedReading]]) -> None:
        """Add callables that tell what sessions have open; it ends when their identities may not have it any more."""
        self._openings += openings

    def answering(self, handler: Handler) -> Handler:
        """A handler that changes the definitions; its session does not end by the change before it is answered."""

        def handle(session: Session, request: Any, body: memoryview, now_us: int) -> Any:
            outcome = handler(session, request, body, now_us)
            if isinstance(outcome, PendingAnswer) and not outcome.resolved:
                self._answering[session] = outcome
                outcome.then(partial(self._answered, session, outcome))
            return outcome

        return handle

    def _answered(self, session: Session, answer: PendingAnswer[Any], _: object) -> None:
        if self._answering.get(session) is answer:
            del self._answering[session]

    def opened(self, session: Session, now_us: int) -> None:
        """Give a new session its access; one that may do nothing in its tenant is refused."""
        document = self._store.load()
        identity = session.identity
        refusal = self._token_refusal(document, session)
        if refusal is not None:  # since the client was authenticated
            raise refusal
        if identity.token_id:
            self._used_us[identity.token_id] = now_us
            self._flush_us = self._flush_us or now_us + _USED_FLUSH_US
        if document.enabled and not session.is_internal:
            session.access = self._access(document, session)
            if session.access.is_empty and identity.name != ANONYMOUS.name:
                raise Forbidden(
                    f"{identity.name} has no role in the tenant {session.tenant}; an administrator can bind one with "
                    f"`headrace auth bind ROLE {identity.name} --in-tenant {session.tenant}`"
                )
        if identity.expires_us:
            self._expiring.set(id(session), identity.expires_us)
            self._by_number[id(session)] = session

    def check_identity(self, session: Session) -> None:
        """Refuse a session of an identity that has as many as it may have."""
        count = self._by_identity.get(session.identity.name, 0)
        if count >= self._per_identity_max and _is_named(session):
            raise LimitExceeded(
                f"{session.identity.name} has {count} connections already, as many as connections_per_identity_max "
                "allows; close some, or raise it",
                connections_per_identity_max=self._per_identity_max,
            )

    def counted(self, session: Session) -> None:
        """Count a session among those of its identity, until it is closed."""
        if _is_named(session):
            name = session.identity.name
            self._by_identity[name] = self._by_identity.get(name, 0) + 1

    def closed(self, session: Session) -> None:
        """Forget a session that was counted."""
        if _is_named(session):
            count = self._by_identity.pop(session.identity.name) - 1
            if count:
                self._by_identity[session.identity.name] = count
        if self._by_number.pop(id(session), None) is not None:
            self._expiring.remove(id(session))

    def tick(self, now_us: int) -> None:
        """End the sessions whose time is over, and record the last uses of tokens now and then."""
        for number in self._expiring.pop_due(now_us, _ENDED_TOGETHER):
            session = self._by_number.pop(number)
            session.end(TokenExpired(f"the credentials of {session.identity.name} have expired: connect with others"))
        if self._flush_us is not None and now_us >= self._flush_us:
            self.flush(now_us)

    def flush(self, now_us: int) -> None:
        """Record the last uses of tokens."""
        used, self._used_us, self._flush_us = self._used_us, {}, None
        used = {one: at for one, at in used.items() if one in self._store.load().tokens}
        if used:
            self._ledger.record(now_us, TokensUsed(used))

    def used_us(self, token_id: str) -> int:
        """When a token was last used; 0 if that is not known."""
        return self._used_us.get(token_id) or self._ledger.state.definitions.used_us.get(token_id, 0)

    def _access(self, document: SecurityDefinitions, session: Session) -> SessionAccess:
        identity = session.identity
        if self._index is None:
            self._index = BindingIndex(document)
        make = partial(Authorizer, document, identity, self._index)
        if identity.claims:
            return SessionAccess(make, session.tenant)
        key = identity.name, identity.tenant, identity.token_id, identity.roles, session.tenant
        found = self._shared.get(key)
        if found is None:
            found = SessionAccess(make, session.tenant)
            if len(self._shared) >= _SHARED_MAX:
                self._shared.clear()
            self._shared[key] = found
        return found

    # Changes.

    def _changed(self, document: SecurityDefinitions) -> None:
        """Give every session its new access at once; what is open follows in slices."""
        self._shared.clear()
        self._index = None
        sessions = list(self._sessions)
        for session in sessions:
            session.access = self._access(document, session) if _is_checked(document, session) else None
            refusal = self._token_refusal(document, session)
            if refusal is not None:
                make = partial(Authorizer, document, session.identity, self._index)
                session.access = RefusedAccess(refusal, make, session.tenant)

        def steps() -> Steps:
            yield
            for number, session in enumerate(sessions, 1):
                error = self._ending(document, session) if session in self._sessions else None
                if error is not None:
                    self._end(session, error)
                if number % _TOGETHER == 0:
                    yield
            opened = [one for opening in self._openings for one in opening()]
            for number, (session, request, end) in enumerate(opened, 1):
                if session.access is not None:
                    try:
                        session.access.check(request)
                    except HeadraceError as error:
                        end(error)
                if number % _TOGETHER == 0:
                    yield

        in_slices(self._ports, steps())

    def _end(self, session: Session, error: HeadraceError) -> None:
        """End a session, after the answer to the change that ends it if it has asked for that itself."""
        answer = self._answering.get(session)
        if answer is not None:
            answer.then(lambda _: self._ports.call_at_turn_end(partial(self._end, session, error)))
        elif session in self._sessions:
            logger.info("session ended  identity=%s reason=%s", session.identity.name, error.code)
            session.end(error)

    def _ending(self, document: SecurityDefinitions, session: Session) -> HeadraceError | None:
        """Why a session ends after a change; None if it goes on."""
        identity = session.identity
        refusal = self._token_refusal(document, session)
        if refusal is not None:
            return refusal
        if session.access is not None and session.access.is_empty:
            if identity.name == ANONYMOUS.name:
                return NotAuthenticated("security was enabled: connect with a token (token=..., HEADRACE_TOKEN)")
            return Forbidden(f"{identity.name} has no role in the tenant {session.tenant} any more")
        return None

    def _token_refusal(self, document: SecurityDefinitions, session: Session) -> HeadraceError | None:
        """Why the token of a session is not accepted any more; None if it is, or there is none."""
        identity = session.identity
        if not identity.token_id:
            return None
        token = document.tokens.get(identity.token_id)
        if token is None:
            return TokenRevoked(f"the token {identity.token_id} of {identity.name} was removed")
        try:
            check_usable(identity.token_id, token, self._ledger.now_us)
        except NotAuthenticated as error:
            return error
        return None


def _is_named(session: Session) -> bool:
    """Whether a session has an identity of its own."""
    return not session.is_internal and session.identity.name not in RESERVED_NAMES


def _is_checked(document: SecurityDefinitions, session: Session) -> bool:
    """Whether requests of a session are authorised: not those of the broker itself."""
    return document.enabled and not session.is_internal
