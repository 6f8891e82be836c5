"""What the sessions of one identity in one tenant may ask for: decisions are made once and remembered."""

from collections.abc import Callable
from copy import copy
from functools import cached_property
from typing import Any

from headrace.model.errors import Forbidden, HeadraceError, NotAuthenticated
from headrace.model.identity import ANONYMOUS
from headrace.model.request import Request, Resource, Verb
from headrace.model.security_requests import ANY
from headrace.model.topic import DEFAULT_TENANT
from headrace.security.authorizer import AccessDecision, Authorizer, ResourceName
from headrace.security.request_names import names_of

_REMEMBERED_MAX = 4096
"""Decisions that are remembered; then all are forgotten, and made again."""
_CREATE, _TOPIC, _EDIT_ANY = Verb.CREATE.value, Resource.TOPIC.value, Verb.EDIT_ANY.value
_CONSUME = Verb.CONSUME.value
_SUBSCRIPTION = Resource.SUBSCRIPTION.value

Required = tuple[tuple[str, ...], ...]
"""Names of things that must exist: a topic's, or a topic's and a subscription's."""


class SessionAccess:
    """Asked once for each request of a session."""

    def __init__(self, make_authorizer: Callable[[], Authorizer], tenant: str) -> None:
        self._make_authorizer = make_authorizer
        self._tenant = tenant
        self._prefix = "" if tenant == DEFAULT_TENANT else f"{tenant}/"
        self._requests: dict[tuple[Any, Any], Required] = {}
        """By request class and names: what must exist."""
        self._names: dict[tuple[str, str, tuple[str, ...]], bool] = {}

    @cached_property
    def _authorizer(self) -> Authorizer:
        """Made when it is first needed: after a change, many sessions get another access at once."""
        return self._make_authorizer()

    def check(self, request: Request[Any]) -> Required:
        """Refuse what the identity may not do; returns the topics and subscriptions that it may use but not create."""
        kind = type(request)
        about = names_of(kind)
        if about.key is None:
            return self._check(request)
        key = kind, about.key(request)
        known = self._requests.get(key)
        if known is None:
            known = self._check(request)
            if len(self._requests) >= _REMEMBERED_MAX:
                self._requests.clear()
            self._requests[key] = known
        return known

    def _check(self, request: Request[Any]) -> Required:
        about = names_of(type(request))
        for verb, resource, names in about.named(request):
            if not self.allows(verb, resource, *names):
                raise self._refusal(verb, resource, names)
        return tuple(names for names in about.created(request) if not self.allows(_CREATE, _kind_of(names), *names))

    def allows(self, verb: str, resource: str, *names: str) -> bool:
        """Whether the identity may do this with what has these names, as the broker says them."""
        key = verb, resource, names
        known = self._names.get(key)
        if known is None:
            known = self.decide(verb, resource, *names).allowed
            if len(self._names) >= _REMEMBERED_MAX:
                self._names.clear()
            self._names[key] = known
        return known

    def decide(self, verb: str, resource: str, *names: str) -> AccessDecision:
        """The decision with its explanation; without names, about the session's tenant."""
        return self._authorizer.decide(verb, resource, self._resource_name(resource, names))

    def _resource_name(self, resource: str, names: tuple[str, ...]) -> ResourceName:
        if not names:
            return ResourceName(self._tenant, "")
        name, *more = names
        if not name and more:  # a topic of the session's tenant
            name, more = self._prefix + more[0], more[1:]
        return ResourceName.of(resource, name, *more)

    def edits_any(self, topic: str) -> bool:
        """Whether the identity may edit messages of a topic whoever owns them."""
        return self.allows(_EDIT_ANY, _TOPIC, topic)

    def require(self, verb: str, resource: str, *names: str) -> None:
        """Refuse what the identity may not do, where only the handler of a request knows what that is about."""
        if not self.allows(verb, resource, *names):
            raise self._refusal(verb, resource, names)

    def require_reading(self, topic: str) -> None:
        """Refuse a topic of which the identity may neither read messages nor lease any."""
        if not self.allows(_CONSUME, _TOPIC, topic) and not self._authorizer.leases_from(topic):
            raise self._refusal(_CONSUME, _TOPIC, (topic,))

    def may_not_create(self, *names: str) -> HeadraceError:
        """The error for a topic, or a subscription, that does not exist and that the identity may not create."""
        return self._refusal(_CREATE, _kind_of(names), names)

    def _refusal(self, verb: str, resource: str, names: tuple[str, ...]) -> HeadraceError:
        """The same whether the named thing exists or not."""
        who = self._authorizer.identity
        told = "/".join(name for name in names if name)
        named = f"{resource} {told}" if told else resource
        what = f"{verb} the {named}"
        details = {"verb": verb, "resource": resource, "name": told}
        if who.name == ANONYMOUS.name:
            return NotAuthenticated(
                f"who is not authenticated may not {what}: connect with a token (token=..., HEADRACE_TOKEN)", **details
            )
        if not self._is_in_scope(verb, resource, names):
            return Forbidden(
                f"{who.name} may not {what} with this token, whose scopes do not include it: use another token, or "
                "create one with the scope (`headrace auth token create`)",
                **details,
            )
        return Forbidden(
            f"{who.name} may not {what}: `headrace auth can {who.name} {verb} {named}` explains it, and an "
            "administrator can bind a role that allows it",
            **details,
        )

    def _is_in_scope(self, verb: str, resource: str, names: tuple[str, ...]) -> bool:
        return self._authorizer.is_in_scope(verb, resource, self._resource_name(resource, names))

    @cached_property
    def is_empty(self) -> bool:
        """Whether the identity has no access at all in the session's tenant."""
        return not self._authorizer.may_enter(self._tenant)

    @property
    def describes_all_tenants(self) -> bool:
        """Whether the identity may see what there is in all tenants, by roles that it has in all of them."""
        return self._authorizer.decide(Verb.DESCRIBE.value, Resource.BROKER.value, ResourceName(ANY, "")).allowed

    def describes(self, resource: str, *names: str) -> bool:
        """Whether the identity may see something in a list."""
        return self.allows(Verb.DESCRIBE.value, resource, *names)


def _kind_of(names: tuple[str, ...]) -> str:
    return _TOPIC if len(names) == 1 else _SUBSCRIPTION


class RefusedAccess(SessionAccess):
    """The access of a session that is about to end: whatever it asks for is refused, and why."""

    def __init__(self, error: HeadraceError, authorizer: Callable[[], Authorizer], tenant: str) -> None:
        super().__init__(authorizer, tenant)
        self._error = error

    def check(self, request: Request[Any]) -> Required:  # noqa: ARG002
        """Refuse the request."""
        raise copy(self._error)  # each request gets its own, with its own traceback
