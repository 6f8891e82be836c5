"""Requests that read and change the security definitions: roles, bindings and tokens."""

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.model.errors import (
    BindingNotFound,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    RoleNotFound,
    TenantNotFound,
    TokenNotFound,
    VersionConflict,
)
from headrace.model.identity import ANONYMOUS, Identity
from headrace.model.limits import DESCRIPTION_CHARS_MAX, TOKENS_MAX
from headrace.model.request import AnswerType, Request, Resource
from headrace.model.security_requests import (
    AccessExplain,
    AccessExplained,
    BindingAdd,
    BindingRemove,
    Grant,
    RoleInfo,
    RoleRemove,
    RoleSet,
    SecurityAlter,
    SecurityChanged,
    SecurityDescribe,
    SecurityInfo,
    SessionIdentity,
    TokenCreate,
    TokenCreated,
    TokenInfo,
    TokenList,
    TokenRevoke,
    TokensFound,
    WhoAmI,
)
from headrace.model.topic import DEFAULT_TENANT, checked_tenant
from headrace.security.authorizer import Authorizer, ResourceName
from headrace.security.definitions import (
    DefinitionsChange,
    DefinitionsStore,
    SecurityDefinitions,
    TokenDefinition,
    check_binding,
    check_grants,
    checked_identity,
    checked_role,
)
from headrace.security.patterns import covering_name, covering_subject
from headrace.security.roles import BUILT_IN_ROLES
from headrace.security.tokens import new_token

Handler = Callable[[Session, Any, memoryview, int], Any]

_LIST_MAX = 1000
_TRIES = 5
"""Further tries of a change that names no version, if others are first."""


class SecurityAdmin:
    """Answers requests about the security definitions. Whether a session may send them, `Broker.ask` has decided."""

    def __init__(self, store: DefinitionsStore, used_us: Callable[[str], int]) -> None:
        self._store = store
        self._used_us = used_us
        self.check_disabling: Callable[[], None] = _nothing
        """Is called before security is disabled; raises an error to refuse that."""

    def requests(self) -> dict[type[Request[Any]], Handler]:
        """The handlers, by request."""
        return {
            SecurityDescribe: lambda _, __, ___, now: self._describe(now),
            SecurityAlter: lambda _, ask, __, now: self._alter(ask, now),
            RoleSet: lambda _, ask, __, now: self._set_role(ask, now),
            RoleRemove: lambda _, ask, __, now: self._remove_role(ask, now),
            BindingAdd: lambda _, ask, __, now: self._bind(ask, now),
            BindingRemove: lambda _, ask, __, now: self._unbind(ask, now),
            TokenCreate: lambda _, ask, __, now: self._create_token(ask, now),
            TokenList: lambda _, ask, __, ___: self._list_tokens(ask),
            TokenRevoke: lambda _, ask, __, now: self._revoke_token(ask, now),
            AccessExplain: lambda _, ask, __, ___: self._explain(ask),
            WhoAmI: lambda session, _, __, ___: self._tell_identity(session),
        }

    def _describe(self, now_us: int) -> SecurityInfo:
        document = self._store.load()
        roles = [
            RoleInfo(name, list(role.grants), role.description, is_built_in=True)
            for name, role in BUILT_IN_ROLES.items()
        ]
        roles += [RoleInfo(name, grants) for name, grants in sorted(document.roles.items())]
        count = len(document.tokens)
        return SecurityInfo(document.version, document.enabled, roles, document.bindings, count, now_us)

    def _alter(self, request: SecurityAlter, now_us: int) -> PendingAnswer[SecurityChanged]:
        if not request.enabled:
            self.check_disabling()
        return self._change(request, DefinitionsChange(enabled=request.enabled), now_us, _version)

    def _set_role(self, request: RoleSet, now_us: int) -> PendingAnswer[SecurityChanged]:
        name = checked_role(request.name)
        if name in BUILT_IN_ROLES:
            raise InvalidArgument(f"the role {name} is built in and cannot be changed: use another name")
        check_grants(request.grants, f"the role {name}")
        return self._change(request, DefinitionsChange(roles={name: request.grants}), now_us, _version)

    def _remove_role(self, request: RoleRemove, now_us: int) -> PendingAnswer[SecurityChanged]:
        document = self._store.load()
        if request.name not in document.roles:
            raise RoleNotFound(f"there is no role {request.name} that could be removed; `headrace auth role list`")
        unbound = [one for one in document.bindings if one.role == request.name]
        change = DefinitionsChange(roles={request.name: None}, unbound=unbound)
        return self._change(request, change, now_us, _version)

    def _bind(self, request: BindingAdd, now_us: int) -> PendingAnswer[SecurityChanged]:
        check_binding(request.binding)
        self._check_role(request.binding.role)
        return self._change(request, DefinitionsChange(bound=[request.binding]), now_us, _version)

    def _unbind(self, request: BindingRemove, now_us: int) -> PendingAnswer[SecurityChanged]:
        if request.binding not in self._store.load().bindings:
            raise BindingNotFound(
                f"the role {request.binding.role} is not bound like that; `headrace auth role list` shows the bindings"
            )
        return self._change(request, DefinitionsChange(unbound=[request.binding]), now_us, _version)

    def _check_role(self, name: str) -> None:
        if name not in BUILT_IN_ROLES and name not in self._store.load().roles:
            raise RoleNotFound(f"there is no role {name}; `headrace auth role list` shows those that there are")

    def _create_token(self, request: TokenCreate, now_us: int) -> PendingAnswer[TokenCreated]:
        if request.tenant:
            self._check_tenant(checked_tenant(request.tenant))
        if len(request.description) > DESCRIPTION_CHARS_MAX:
            raise InvalidArgument(f"a token's description has at most {DESCRIPTION_CHARS_MAX} characters")
        if request.expires_us and request.expires_us <= now_us:
            raise InvalidArgument("expires_us is in the past: give a time to come, or 0 for a token without an end")
        check_grants(request.scopes, "a token")
        token_id, token, hashed = new_token()
        definition = TokenDefinition(
            hash=hashed,
            identity=checked_identity(request.identity),
            tenant=request.tenant,
            scopes=tuple(request.scopes),
            created_us=now_us,
            expires_us=request.expires_us,
            description=request.description,
        )
        change = DefinitionsChange(tokens={token_id: definition, **self._outdated(now_us)})
        answer = TokenCreated(_token_info(token_id, definition, 0), token)
        return self._change(request, change, now_us, lambda _: answer)

    def _check_tenant(self, name: str) -> None:
        """Refuse a tenant that was not made: nobody can use it while security is on."""
        document = self._store.load()
        known = document.tenants.get(name)
        if document.enabled and name != DEFAULT_TENANT and (known is None or known.deleting):
            raise TenantNotFound(
                f"there is no tenant {name}: `headrace tenant create {name}` makes it, and `headrace tenant list` "
                "shows those that there are"
            )

    def _outdated(self, now_us: int) -> dict[str, None]:
        """The token that a new one replaces where there are as many as there may be: the oldest that is over."""
        tokens = self._store.load().tokens
        if len(tokens) < TOKENS_MAX:
            return {}
        over = [(token.created_us, one) for one, token in tokens.items() if token.is_over(now_us)]
        if not over:
            raise LimitExceeded(f"there are {TOKENS_MAX} tokens in use, which is the maximum; revoke some")
        return {min(over)[1]: None}

    def _list_tokens(self, request: TokenList) -> TokensFound:
        if not 1 <= request.limit <= _LIST_MAX:
            raise InvalidArgument(f"limit must be 1 to {_LIST_MAX}, not {request.limit}")
        found = sorted(
            (token_id, token)
            for token_id, token in self._store.load().tokens.items()
            if token_id > request.after and request.identity in ("", token.identity)
        )
        infos = [_token_info(token_id, token, self._used_us(token_id)) for token_id, token in found[: request.limit]]
        return TokensFound(infos, infos[-1].id if len(found) > request.limit else "")

    def _revoke_token(self, request: TokenRevoke, now_us: int) -> PendingAnswer[TokensFound]:
        known = self._store.load().tokens.get(request.id)
        if known is None:
            raise TokenNotFound("there is no token with that id; `headrace auth token list` shows those that there are")
        revoked = known if known.revoked_us else msgspec.structs.replace(known, revoked_us=now_us)
        answer = TokensFound([_token_info(request.id, revoked, self._used_us(request.id))])
        return self._change(request, DefinitionsChange(tokens={request.id: revoked}), now_us, lambda _: answer)

    def _explain(self, request: AccessExplain) -> AccessExplained:
        document = self._store.load()
        resource = request.resource
        check_grants([Grant([request.verb], resource, [request.name or "*"])], "the question")
        token = document.tokens.get(request.identity)
        if token is not None:
            identity = Identity(token.identity, token.tenant, request.claims, request.identity)
        else:
            identity = Identity(request.identity, claims=request.claims)
        tenant = request.tenant or identity.tenant or DEFAULT_TENANT
        name = covering_subject(request.name) if resource == Resource.SUBJECT.value else covering_name(request.name)
        return AccessExplained(
            *Authorizer(document, identity).decide(request.verb, resource, ResourceName(tenant, name))
        )

    def _tell_identity(self, session: Session) -> SessionIdentity:
        document, identity = self._store.load(), session.identity
        return SessionIdentity(
            identity=identity.name,
            tenant=session.tenant,
            is_authenticated=identity.name != ANONYMOUS.name,
            security_enabled=document.enabled,
            roles=Authorizer(document, identity).roles(session.tenant),
            token_id=identity.token_id,
            expires_us=identity.expires_us,
        )

    def _change(
        self,
        request: Request[Any],
        change: DefinitionsChange,
        now_us: int,
        answer: Callable[[SecurityDefinitions], AnswerType],
    ) -> PendingAnswer[AnswerType]:
        """Change the document from the version that the request expects, or from the one that was looked at here."""
        version = self._store.load().version
        expected: int | None = getattr(request, "expected_version", None)
        if expected is not None and expected != version:
            raise VersionConflict(
                f"the security definitions have version {version}, not {expected}: read them again, and repeat the "
                "change",
                version=version,
            )
        pending: PendingAnswer[AnswerType] = PendingAnswer()

        tries = iter(range(_TRIES))

        def done(outcome: SecurityDefinitions | HeadraceError) -> None:
            if isinstance(outcome, VersionConflict) and expected is None and next(tries, None) is not None:
                # In a cluster another change may have been on its way to the shared store.
                self._store.compare_and_set(change, self._store.load().version, now_us, done)
                return
            pending.resolve(outcome if isinstance(outcome, HeadraceError) else answer(outcome))

        self._store.compare_and_set(change, version, now_us, done)
        return pending


def _nothing() -> None:
    """Refuse nothing."""


def _version(document: SecurityDefinitions) -> SecurityChanged:
    return SecurityChanged(document.version)


def _token_info(token_id: str, token: TokenDefinition, used_us: int) -> TokenInfo:
    return TokenInfo(
        id=token_id,
        identity=token.identity,
        tenant=token.tenant,
        scopes=list(token.scopes),
        created_us=token.created_us,
        expires_us=token.expires_us,
        revoked_us=token.revoked_us,
        used_us=used_us,
        description=token.description,
    )
