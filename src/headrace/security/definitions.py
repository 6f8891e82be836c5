"""The security definitions: one versioned document with everything that decides who may do what.

It is behind a port, `DefinitionsStore`. A single broker keeps it in its journal (`broker/definitions.py`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import msgspec

from headrace.model.arguments import shown
from headrace.model.errors import HeadraceError, InvalidArgument, LimitExceeded
from headrace.model.identity import RESERVED_NAMES
from headrace.model.limits import (
    BINDINGS_MAX,
    GRANT_PATTERN_CHARS_MAX,
    GRANTS_MAX,
    IDENTITY_CHARS_MAX,
    ROLES_MAX,
    TOKENS_MAX,
)
from headrace.model.request import Resource, Verb
from headrace.model.security_requests import ANY, Binding, Grant
from headrace.model.topic import checked_plain_name, checked_tenant
from headrace.security.tenants import TenantDefinition

_VERBS = frozenset(verb.value for verb in Verb) | {ANY}
_RESOURCES = frozenset(resource.value for resource in Resource) | {ANY}
_NAME_CHARACTERS = re.compile(r"[^\s\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+")
_Value = TypeVar("_Value")


class TokenDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token as it is stored: of its secret there is only a hash."""

    hash: bytes
    """SHA-256 of the secret."""
    identity: str
    tenant: str = ""
    """The tenant that the identity belongs to; empty: any that its roles allow."""
    scopes: tuple[Grant, ...] = ()
    """What the token can be used for, of all that its identity may do; empty: all of it."""
    created_us: int = 0
    expires_us: int = 0
    """0: never."""
    revoked_us: int = 0
    """0: it is not revoked."""
    description: str = ""

    def is_over(self, now_us: int) -> bool:
        """Whether it was revoked or has expired."""
        return bool(self.revoked_us) or 0 < self.expires_us <= now_us


class DefinitionsChange(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A change of some parts of the document; None removes an entry."""

    enabled: bool | None = None
    tenants: dict[str, TenantDefinition | None] = {}
    roles: dict[str, list[Grant] | None] = {}
    bound: list[Binding] = []
    unbound: list[Binding] = []
    tokens: dict[str, TokenDefinition | None] = {}


class SecurityDefinitions(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document. It is never changed in place: a change makes a new one."""

    version: int = 0
    """Counts the changes; for compare-and-set."""
    enabled: bool = False
    """Whether requests are authorised."""
    tenants: dict[str, TenantDefinition] = {}
    roles: dict[str, list[Grant]] = {}
    """Roles beside the built-in ones."""
    bindings: list[Binding] = []
    tokens: dict[str, TokenDefinition] = {}
    """By id."""

    def changed(self, change: DefinitionsChange, version: int) -> "SecurityDefinitions":
        """The document after a change.

        >>> SecurityDefinitions().changed(DefinitionsChange(enabled=True), 1).enabled
        True
        """
        bindings = self.bindings
        if change.bound or change.unbound:
            bindings = [one for one in bindings if one not in change.unbound and one not in change.bound]
            bindings += change.bound
        return SecurityDefinitions(
            version=version,
            enabled=self.enabled if change.enabled is None else change.enabled,
            tenants=_merged(self.tenants, change.tenants),
            roles=_merged(self.roles, change.roles),
            bindings=bindings,
            tokens=_merged(self.tokens, change.tokens),
        )

    def check_room(self) -> None:
        """Refuse a document that has more of something than a broker holds."""
        for what, count, most in (
            ("roles", len(self.roles), ROLES_MAX),
            ("bindings", len(self.bindings), BINDINGS_MAX),
            ("tokens", len(self.tokens), TOKENS_MAX),
        ):
            if count > most:
                raise LimitExceeded(f"a broker has at most {most} {what}; remove some first")


DefinitionsOutcome = Callable[[SecurityDefinitions | HeadraceError], None]
"""Takes the document after a change, or why there was none."""


class DefinitionsStore(Protocol):
    """Where the document is stored."""

    def load(self) -> SecurityDefinitions:
        """The document as it is now."""

    def compare_and_set(
        self, change: DefinitionsChange, expected_version: int, now_us: int, done: DefinitionsOutcome
    ) -> None:
        """Change the document if it has this version; calls back when that is durable, else with VersionConflict."""

    def on_change(self, listener: Callable[[SecurityDefinitions], None]) -> None:
        """Call this with the document after each change."""


def _merged(before: dict[str, _Value], changes: Mapping[str, _Value | None]) -> dict[str, _Value]:
    if not changes:
        return before
    after = {**before, **changes}
    return {name: value for name, value in after.items() if value is not None}


def check_grants(grants: list[Grant], what: str) -> None:
    """Refuse grants that name no verb or resource that there is, or that are too many."""
    if len(grants) > GRANTS_MAX:
        raise InvalidArgument(f"{what} has at most {GRANTS_MAX} grants, not {len(grants)}")
    for grant in grants:
        for verb in grant.verbs:
            if verb not in _VERBS:
                raise InvalidArgument(f"{shown(verb)} is no verb: use {', '.join(sorted(_VERBS))}")
        if not grant.verbs:
            raise InvalidArgument(f"a grant of {what} has no verb: use {', '.join(sorted(_VERBS))}")
        if grant.resource not in _RESOURCES:
            raise InvalidArgument(
                f"{shown(grant.resource)} is no kind of resource: use {', '.join(sorted(_RESOURCES))}"
            )
        if not 0 < len(grant.patterns) <= GRANTS_MAX:
            raise InvalidArgument(f"a grant has 1 to {GRANTS_MAX} patterns, not {len(grant.patterns)}")
        for pattern in grant.patterns:
            check_name_pattern(pattern)
            _check_slashes(grant.resource, pattern)


def _check_slashes(resource: str, pattern: str) -> None:
    """Refuse a pattern that no name matches, because names in grants have no tenant."""
    if resource == Resource.SUBSCRIPTION.value and pattern.count("/") > 1:
        raise InvalidArgument(
            f"{shown(pattern)} matches no subscription: write TOPIC/NAME, without a tenant, and bind the role in the "
            "tenant (`--in-tenant`)"
        )
    if resource not in (ANY, Resource.SUBSCRIPTION.value) and "/" in pattern:
        raise InvalidArgument(
            f"{shown(pattern)} matches no {resource}: leave the tenant out, and bind the role in the tenant "
            "(`--in-tenant`)"
        )


def check_binding(binding: Binding) -> None:
    """Refuse a binding that no identity could match, or whose tenant cannot exist."""
    if binding.tenant != ANY:
        checked_tenant(binding.tenant)
    if not binding.identity and not binding.claims:
        raise InvalidArgument("a binding names an identity, or claims of a JWT, or both: `*` stands for every identity")
    if binding.identity:
        check_name_pattern(binding.identity)
    if len(binding.claims) > GRANTS_MAX:
        raise InvalidArgument(f"a binding has at most {GRANTS_MAX} claims, not {len(binding.claims)}")
    for claim, pattern in binding.claims.items():
        check_name_pattern(claim)
        check_name_pattern(pattern)


def check_name_pattern(pattern: str) -> None:
    """Refuse what is no pattern of names: it is empty, too long, or has characters that no name has."""
    if len(pattern) > GRANT_PATTERN_CHARS_MAX or not _NAME_CHARACTERS.fullmatch(pattern):
        raise InvalidArgument(
            f"{shown(pattern)} is no pattern: use 1 to {GRANT_PATTERN_CHARS_MAX} characters without spaces and control "
            "characters; `*` stands for any characters, `?` for one"
        )


def checked_role(name: str) -> str:
    """The name, if it may be a role's."""
    return checked_plain_name(name, "role")


def checked_identity(name: str) -> str:
    """The name, if it may be an identity's: patterns of bindings must not be taken for names."""
    if len(name) > IDENTITY_CHARS_MAX or not _NAME_CHARACTERS.fullmatch(name) or "*" in name or "?" in name:
        raise InvalidArgument(
            f"{shown(name)} cannot name an identity: use 1 to {IDENTITY_CHARS_MAX} characters without spaces, control "
            "characters, '*' and '?'"
        )
    if name in RESERVED_NAMES:
        raise InvalidArgument(f"{name} is the name of whoever connects without a token: use another name")
    return name
