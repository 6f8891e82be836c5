"""The decision whether an identity may do something: pure, from the security definitions alone.

Nothing is allowed unless a grant of a role that is bound to the identity allows it. Who may do anything with a thing
may describe it, and `edit-any` includes `edit-own`. An identity that belongs to a tenant has access there only.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from headrace.model.identity import ANONYMOUS, Identity
from headrace.model.request import Resource, Verb
from headrace.model.security_requests import ANY, Binding, Grant
from headrace.model.topic import tenant_of
from headrace.security.definitions import SecurityDefinitions
from headrace.security.patterns import covering_name, covering_subject, matches
from headrace.security.roles import BUILT_IN_ROLES

_DESCRIBE = Verb.DESCRIBE.value
_EDIT_OWN, _EDIT_ANY = Verb.EDIT_OWN.value, Verb.EDIT_ANY.value
_EVERYWHERE = frozenset({Resource.SECURITY.value, Resource.CLUSTER.value})
"""Resources of the whole broker: only identities of no tenant, by bindings in all tenants, have access to them."""


class AccessDecision(NamedTuple):
    """Whether something is allowed, and what decided it."""

    allowed: bool
    rule: str
    """The grant, the role and the binding that allow it; empty if nothing does."""
    text: str
    """The same in a sentence."""


class Rule(NamedTuple):
    """A grant that an identity has, and where it comes from."""

    grant: Grant
    tenant: str
    """The tenant in which it counts; `*`: all."""
    role: str
    bound: str
    """How the role is bound to the identity, in words."""

    def __str__(self) -> str:
        verbs, patterns = ", ".join(self.grant.verbs), ", ".join(self.grant.patterns)
        return f"role {self.role} ({self.bound}): {verbs} on {self.grant.resource} {patterns}"


class ResourceName(NamedTuple):
    """What a request names: the tenant, and the name in it as patterns are matched with it."""

    tenant: str
    name: str

    @classmethod
    def of(cls, resource: str, name: str, *more: str) -> "ResourceName":
        """The name of a resource as the broker has it: `tenant/name`; a subscription's after its topic's."""
        tenant, bare = tenant_of(name), name.rpartition("/")[2]
        if resource == Resource.SUBJECT.value:
            return cls(tenant, covering_subject(bare))
        return cls(tenant, covering_name("/".join((bare, *more))))


class BindingIndex:
    """The bindings of a version of the definitions, by identity: most of them name exactly one."""

    def __init__(self, definitions: SecurityDefinitions) -> None:
        self._exact: dict[str, list[Binding]] = {}
        self._others: list[Binding] = []
        for binding in definitions.bindings:
            is_pattern = not binding.identity or "*" in binding.identity or "?" in binding.identity
            (self._others if is_pattern else self._exact.setdefault(binding.identity, [])).append(binding)

    def bindings_of(self, identity: Identity) -> list[Binding]:
        """The bindings that are about an identity."""
        found = [*self._exact.get(identity.name, ()), *self._others]
        return [binding for binding in found if _is_bound(binding, identity)]


class Authorizer:
    """What one identity may do, by one version of the definitions."""

    def __init__(self, definitions: SecurityDefinitions, identity: Identity, index: BindingIndex | None = None) -> None:
        self.identity = identity
        self.rules = list(_rules(definitions, identity, index or BindingIndex(definitions)))
        token = definitions.tokens.get(identity.token_id)
        self._scopes = token.scopes if token is not None else ()

    def decide(self, verb: str, resource: str, named: ResourceName) -> AccessDecision:
        """Whether the identity may do this, and by which rule."""
        identity, tenant = self.identity, named.tenant
        who, what = (
            identity.name,
            f"{verb} {resource} {named.name or '(all)'} in the tenant {tenant}".replace("\0", "*"),
        )
        if resource in _EVERYWHERE:
            tenant, what = ANY, f"{verb} {resource}"
        if identity.tenant and tenant != identity.tenant:
            return AccessDecision(False, "", f"{who} may not {what}: it belongs to the tenant {identity.tenant}")
        if not self.is_in_scope(verb, resource, named):
            return AccessDecision(False, "", f"{who} may not {what}: the token's scopes do not include it")
        for rule in self.rules:
            if rule.tenant in (ANY, tenant) and _allows(rule.grant, verb, resource, named.name):
                return AccessDecision(True, str(rule), f"{who} may {what}, by the {rule}")
        return AccessDecision(
            False, "", f"{who} may not {what}: none of its roles allows it ({self._told_roles(tenant)})"
        )

    def is_in_scope(self, verb: str, resource: str, named: ResourceName) -> bool:
        """Whether the identity's token can be used for this, if a role allows it."""
        return not self._scopes or any(_allows(scope, verb, resource, named.name) for scope in self._scopes)

    def leases_from(self, topic: str) -> bool:
        """Whether the identity may lease messages of some subscription of a topic, whichever that is."""
        tenant, name = ResourceName.of(Resource.TOPIC.value, topic)
        if self.identity.tenant not in ("", tenant):
            return False
        in_scope = not self._scopes or any(_leases_from(scope, name) for scope in self._scopes)
        return in_scope and any(rule.tenant in (ANY, tenant) and _leases_from(rule.grant, name) for rule in self.rules)

    def may_enter(self, tenant: str) -> bool:
        """Whether the identity has any access in a tenant."""
        return self.identity.tenant in ("", tenant) and any(rule.tenant in (ANY, tenant) for rule in self.rules)

    def roles(self, tenant: str) -> list[str]:
        """The roles that the identity has in a tenant."""
        return list(dict.fromkeys(rule.role for rule in self.rules if rule.tenant in (ANY, tenant)))

    def _told_roles(self, tenant: str) -> str:
        roles = self.roles(tenant)
        return f"it has the roles {', '.join(roles)}" if roles else "it has none there"


def _allows(grant: Grant, verb: str, resource: str, name: str) -> bool:
    if grant.resource not in (ANY, resource):
        return False
    verbs = grant.verbs
    if not (verb in verbs or ANY in verbs or verb == _DESCRIBE or (verb == _EDIT_OWN and _EDIT_ANY in verbs)):
        return False
    if resource == Resource.SUBSCRIPTION.value:
        return any(_covers_subscription(pattern, name) for pattern in grant.patterns)
    return any(matches(pattern, name) for pattern in grant.patterns)


def _leases_from(grant: Grant, topic: str) -> bool:
    if grant.resource not in (ANY, Resource.SUBSCRIPTION.value) or not {ANY, Verb.LEASE.value} & set(grant.verbs):
        return False
    return any(matches(pattern.partition("/")[0], topic) for pattern in grant.patterns)


def _covers_subscription(pattern: str, name: str) -> bool:
    """Whether a pattern covers `topic/subscription`; one without a slash is about the topic alone."""
    if "/" not in pattern:
        return matches(pattern, name.partition("/")[0])
    topic, _, subscription = name.partition("/")
    topic_pattern, _, subscription_pattern = pattern.partition("/")
    return matches(topic_pattern, topic) and matches(subscription_pattern, subscription)


def _rules(definitions: SecurityDefinitions, identity: Identity, index: BindingIndex) -> Iterator[Rule]:
    for role in identity.roles:
        yield from _rules_of(definitions, role, ANY, "which this way to connect gives")
    for binding in index.bindings_of(identity):
        yield from _rules_of(definitions, binding.role, binding.tenant, _told(binding))


def _rules_of(definitions: SecurityDefinitions, role: str, tenant: str, bound: str) -> Iterator[Rule]:
    built_in = BUILT_IN_ROLES.get(role)
    grants = built_in.grants if built_in is not None else definitions.roles.get(role, ())
    for grant in grants:
        yield Rule(grant, tenant, role, bound)


def _is_bound(binding: Binding, identity: Identity) -> bool:
    """Whether a binding is about an identity; one that did not authenticate only by its very name."""
    if identity.name == ANONYMOUS.name:
        return binding.identity == ANONYMOUS.name and not binding.claims
    if binding.identity and not matches(binding.identity, identity.name):
        return False
    return all(_has_claim(identity.claims, claim, pattern) for claim, pattern in binding.claims.items())


def _has_claim(claims: Mapping[str, Any], claim: str, pattern: str) -> bool:
    """Whether a claim's value, or one of its values, matches."""
    value = claims.get(claim)
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(one, str) and matches(pattern, one) for one in values)


def _told(binding: Binding) -> str:
    claims = [f"the claim {claim} {pattern}" for claim, pattern in sorted(binding.claims.items())]
    who = " and ".join([*([binding.identity] if binding.identity else []), *claims])
    return f"bound to {who} in {'all tenants' if binding.tenant == ANY else f'the tenant {binding.tenant}'}"
