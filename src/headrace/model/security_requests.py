"""Requests about security: roles, bindings, tokens, and what an identity may do."""

import msgspec

from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, WireStruct, declare

ANY = "*"
"""In grants and bindings: every verb, every kind of resource, every name, every tenant."""

_ADMINISTER = Permission(Verb.ADMINISTER, Resource.SECURITY)


class Grant(WireStruct):
    """Verbs that are allowed on resources of a kind whose names match one of the patterns."""

    verbs: list[str]
    """Verbs such as `publish`; `*` for all."""
    resource: str
    """A kind of resource such as `topic`; `*` for all."""
    patterns: list[str]
    """Names without their tenant: `*` stands for any characters, `?` for one. Of a subscription: `TOPIC/NAME`."""


class Binding(WireStruct):
    """Gives a role to identities, in one tenant or in all."""

    role: str
    identity: str = ""
    """A pattern of names: `*` stands for any characters, `?` for one; empty: claims alone decide."""
    claims: dict[str, str] = msgspec.field(default_factory=dict)
    """Claims of a JWT that all have to match, with patterns of their values; only identities with claims have them."""
    tenant: str = ANY
    """The tenant in which the role counts; `*`: all."""


class RoleInfo(WireStruct):
    """A role, and what it grants."""

    name: str
    grants: list[Grant]
    description: str = ""
    is_built_in: bool = False


class SecurityInfo(Answer):
    """The security definitions, without tokens and tenants."""

    version: int
    """Counts the changes."""
    enabled: bool
    roles: list[RoleInfo]
    bindings: list[Binding]
    tokens: int = 0
    """How many tokens there are."""
    time_us: int = 0
    """The broker's time."""


@declare(Kind.SECURITY_DESCRIBE, _ADMINISTER)
class SecurityDescribe(Request[SecurityInfo]):
    """Describe the security definitions."""


class SecurityChanged(Answer):
    """The security definitions were changed; open sessions follow the change."""

    version: int


@declare(Kind.SECURITY_ALTER, _ADMINISTER)
class SecurityAlter(Request[SecurityChanged]):
    """Switch security on or off."""

    enabled: bool
    expected_version: int | None = None
    """Refused with `version_conflict` if the definitions have another version; None: whatever they have."""


@declare(Kind.ROLE_SET, _ADMINISTER)
class RoleSet(Request[SecurityChanged]):
    """Create a role, or replace what it grants."""

    name: str
    grants: list[Grant]
    expected_version: int | None = None


@declare(Kind.ROLE_REMOVE, _ADMINISTER)
class RoleRemove(Request[SecurityChanged]):
    """Remove a role and its bindings."""

    name: str
    expected_version: int | None = None


@declare(Kind.BINDING_ADD, _ADMINISTER)
class BindingAdd(Request[SecurityChanged]):
    """Give a role to identities; without effect if they have it by the same binding."""

    binding: Binding
    expected_version: int | None = None


@declare(Kind.BINDING_REMOVE, _ADMINISTER)
class BindingRemove(Request[SecurityChanged]):
    """Remove a binding."""

    binding: Binding
    expected_version: int | None = None


class TokenInfo(WireStruct):
    """A token, without its secret."""

    id: str
    identity: str
    tenant: str = ""
    """The tenant that the identity belongs to; empty: it may use any that its roles allow."""
    scopes: list[Grant] = msgspec.field(default_factory=list)
    """What the token can be used for, of all that its identity may do; empty: all of it."""
    created_us: int = 0
    expires_us: int = 0
    """0: never."""
    revoked_us: int = 0
    """When it was revoked; 0: it was not."""
    used_us: int = 0
    """When it was last used, to within a minute; 0: never since the broker recorded it."""
    description: str = ""


class TokenCreated(Answer):
    """A new token. The secret is in this answer only."""

    info: TokenInfo
    token: str

    def __repr__(self) -> str:
        return f"TokenCreated(info={self.info!r}, token='***')"


@declare(Kind.TOKEN_CREATE, _ADMINISTER)
class TokenCreate(Request[TokenCreated]):
    """Create a token for an identity."""

    identity: str
    tenant: str = ""
    scopes: list[Grant] = msgspec.field(default_factory=list)
    expires_us: int = 0
    description: str = ""


class TokensFound(Answer):
    """A page of tokens, by id; `after` continues behind it, and is empty at the end."""

    tokens: list[TokenInfo]
    after: str = ""


@declare(Kind.TOKEN_LIST, _ADMINISTER)
class TokenList(Request[TokensFound]):
    """List tokens, by id, in pages."""

    identity: str = ""
    """Only those of this identity; empty: of all."""
    after: str = ""
    limit: int = 1000


@declare(Kind.TOKEN_REVOKE, _ADMINISTER)
class TokenRevoke(Request[TokensFound]):
    """Revoke a token: its sessions end at once. The answer has the token."""

    id: str


class AccessExplained(Answer):
    """Whether an identity may do something, and why."""

    allowed: bool
    rule: str
    """The grant, the role and the binding that allow it; empty if nothing does."""
    text: str
    """The same in a sentence."""


@declare(Kind.ACCESS_EXPLAIN, _ADMINISTER)
class AccessExplain(Request[AccessExplained]):
    """Explain whether an identity may do something."""

    identity: str
    """The name of an identity, or the id of a token."""
    verb: str
    resource: str
    name: str = ""
    """Without its tenant; of a subscription `TOPIC/NAME`. Empty: of the broker, which has no name."""
    tenant: str = ""
    """Where the thing is; empty: in the identity's own tenant, or in the default one."""
    claims: dict[str, str] = msgspec.field(default_factory=dict)
    """Claims that the identity's JWT would have."""


class SessionIdentity(Answer):
    """Who the broker takes the session for."""

    identity: str
    tenant: str
    """The tenant of the session."""
    is_authenticated: bool
    security_enabled: bool
    roles: list[str] = msgspec.field(default_factory=list)
    """Roles that count in the session's tenant."""
    token_id: str = ""
    expires_us: int = 0
    """When the session ends; 0: never."""


@declare(Kind.WHO_AM_I, awaits_commit=False)
class WhoAmI(Request[SessionIdentity]):
    """Tell who the broker takes the session for."""
