"""Administration of security: roles, bindings and tokens, and what identities may do."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client.times import Moment, microseconds
from headrace.model.errors import InvalidArgument
from headrace.model.security_requests import (
    ANY,
    AccessExplain,
    AccessExplained,
    Binding,
    BindingAdd,
    BindingRemove,
    Grant,
    RoleRemove,
    RoleSet,
    SecurityAlter,
    SecurityDescribe,
    SecurityInfo,
    SessionIdentity,
    TokenCreate,
    TokenCreated,
    TokenInfo,
    TokenList,
    TokenRevoke,
    WhoAmI,
)


class AsyncAuth:
    """Administers security; `bus.auth`. All but `who_am_i` need an administrator of all tenants.

    Example:
        >>> await bus.auth.set_role("bookkeeper", [headrace.Grant(["consume"], "topic", ["orders.*"])])
        >>> await bus.auth.bind("bookkeeper", "ada")
        >>> (await bus.auth.can("ada", "consume", "topic", "orders.eu")).allowed
        True
    """

    def __init__(self, bus: object, broker: AsyncReconnectingConnection) -> None:
        self._bus = bus  # it closes its connections when nobody holds it
        self._broker = broker

    async def describe(self) -> SecurityInfo:
        """Describe the security definitions: whether they are enabled, roles and bindings.

        Returns:
            The definitions, without tokens.

        Raises:
            Forbidden: if this client is no administrator.
            Timeout: if the broker does not answer in time.

        Example:
            >>> (await bus.auth.describe()).enabled
            False
        """
        return await self._broker.request(SecurityDescribe())

    async def enable(self, enabled: bool = True, *, expected_version: int | None = None) -> None:
        """Authorise requests from now on, or with False no more; open connections follow at once.

        Parameters:
            enabled: whether requests are authorised.
            expected_version: refuse if the definitions have another version.

        Raises:
            Forbidden: if this client is no administrator.
            VersionConflict: if the definitions have another version.
            Timeout: if the broker does not answer in time.

        Example:
            >>> await bus.auth.enable()
            >>> await bus.auth.enable(False)
        """
        await self._broker.request(SecurityAlter(enabled, expected_version))

    async def set_role(self, name: str, grants: Sequence[Grant], *, expected_version: int | None = None) -> None:
        """Create a role, or replace what it grants.

        Parameters:
            name: the role; built-in roles cannot be changed.
            grants: what it allows.
            expected_version: refuse if the definitions have another version.

        Raises:
            InvalidArgument: if a verb, a resource or a pattern is wrong.
            Forbidden: if this client is no administrator.
            VersionConflict: if the definitions have another version.
            Timeout: if the broker does not answer in time.

        Example:
            >>> await bus.auth.set_role("bookkeeper", [headrace.Grant(["consume"], "topic", ["*"])])
        """
        await self._broker.request(RoleSet(name, list(grants), expected_version))

    async def remove_role(self, name: str, *, expected_version: int | None = None) -> None:
        """Remove a role and its bindings.

        Parameters:
            name: the role.
            expected_version: refuse if the definitions have another version.

        Raises:
            RoleNotFound: if there is no such role, or it is built in.
            Forbidden: if this client is no administrator.
            VersionConflict: if the definitions have another version.
            Timeout: if the broker does not answer in time.

        Example:
            >>> await bus.auth.set_role("bookkeeper", [headrace.Grant(["consume"], "topic", ["*"])])
            >>> await bus.auth.remove_role("bookkeeper")
        """
        await self._broker.request(RoleRemove(name, expected_version), repeat=False)

    async def bind(
        self, role: str, identity: str = "", *, claims: Mapping[str, str] | None = None, tenant: str = ANY
    ) -> None:
        """Give a role to identities.

        Parameters:
            role: the role.
            identity: a name, or a pattern: `*` stands for any characters, `?` for one; by default claims alone decide.
            claims: claims of a JWT that all have to match, with patterns of their values.
            tenant: where the role counts; by default in all tenants.

        Raises:
            RoleNotFound: if there is no such role.
            InvalidArgument: if neither an identity nor claims are given, or one of them is wrong.
            Forbidden: if this client is no administrator.
            Timeout: if the broker does not answer in time.

        Example:
            >>> await bus.auth.bind("publisher", "sensor-*", tenant="plant")
        """
        await self._broker.request(BindingAdd(Binding(role, identity, dict(claims or {}), tenant)))

    async def unbind(
        self, role: str, identity: str = "", *, claims: Mapping[str, str] | None = None, tenant: str = ANY
    ) -> None:
        """Remove a binding.

        Parameters:
            role: the role.
            identity: the pattern of the binding.
            claims: the claims of the binding.
            tenant: the tenant of the binding.

        Raises:
            BindingNotFound: if there is no such binding.
            Forbidden: if this client is no administrator.
            Timeout: if the broker does not answer in time.

        Example:
            >>> await bus.auth.bind("consumer", "ada")
            >>> await bus.auth.unbind("consumer", "ada")
        """
        await self._broker.request(BindingRemove(Binding(role, identity, dict(claims or {}), tenant)), repeat=False)

    async def create_token(
        self,
        identity: str,
        *,
        tenant: str = "",
        scopes: Sequence[Grant] = (),
        expires: Moment | timedelta | None = None,
        description: str = "",
    ) -> TokenCreated:
        """Create a token. The secret is in the answer only: the broker stores a hash of it.

        Parameters:
            identity: the name of who uses it; roles are bound to that.
            tenant: the tenant that the identity belongs to; by default it may use any that its roles allow.
            scopes: what the token can be used for, of all that the identity may do; by default all of it.
            expires: when it ends, or how long it lasts; by default it does not end.
            description: what it is for.

        Returns:
            The token and what is known about it.

        Raises:
            InvalidArgument: if the identity or another argument is wrong.
            LimitExceeded: if there are too many tokens.
            Forbidden: if this client is no administrator.
            Timeout: if the broker does not answer in time.

        Example:
            >>> created = await bus.auth.create_token("ada", description="laptop")
            >>> created.token.startswith("hr_")
            True
        """
        if isinstance(expires, timedelta):
            if expires <= timedelta(0):
                raise InvalidArgument(f"expires must be in the future, not after {expires}")
            now = await self._broker.request(SecurityDescribe())  # the broker's clock decides, not this one
            expires_us = now.time_us + round(expires.total_seconds() * 1e6)
        else:
            expires_us = 0 if expires is None else microseconds(expires)
        asked = TokenCreate(identity, tenant, list(scopes), expires_us, description)
        return await self._broker.request(asked, repeat=False)

    async def tokens(self, identity: str = "") -> "list[TokenInfo]":
        """List tokens, without their secrets.

        Parameters:
            identity: only those of this identity; by default all.

        Returns:
            The tokens, by id.

        Raises:
            Forbidden: if this client is no administrator.
            Timeout: if the broker does not answer in time.

        Example:
            >>> [token.identity for token in await bus.auth.tokens("nobody")]
            []
        """
        found: list[TokenInfo] = []
        after = ""
        while True:
            page = await self._broker.request(TokenList(identity, after))
            found += page.tokens
            after = page.after
            if not after:
                return found

    async def revoke(self, token_id: str) -> TokenInfo:
        """Revoke a token: connections that use it end at once.

        Parameters:
            token_id: its id, the part between the underscores.

        Returns:
            The token.

        Raises:
            TokenNotFound: if there is no such token.
            Forbidden: if this client is no administrator.
            Timeout: if the broker does not answer in time.

        Example:
            >>> created = await bus.auth.create_token("ada")
            >>> (await bus.auth.revoke(created.info.id)).revoked_us > 0
            True
        """
        return (await self._broker.request(TokenRevoke(token_id))).tokens[0]

    async def can(
        self,
        identity: str,
        verb: str,
        resource: str,
        name: str = "",
        *,
        tenant: str = "",
        claims: Mapping[str, str] | None = None,
    ) -> AccessExplained:
        """Explain whether an identity may do something.

        Parameters:
            identity: the name of an identity, or the id of a token.
            verb: what it would do, such as `publish`.
            resource: the kind of thing, such as `topic`.
            name: its name; of a subscription `TOPIC/NAME`.
            tenant: where the thing is; by default in the identity's own tenant, or in the default one.
            claims: claims that the identity's JWT would have.

        Returns:
            Whether it is allowed, and by which rule.

        Raises:
            InvalidArgument: if there is no such verb or resource.
            Forbidden: if this client is no administrator.
            Timeout: if the broker does not answer in time.

        Example:
            >>> (await bus.auth.can("eve", "publish", "topic", "orders")).allowed
            False
        """
        return await self._broker.request(AccessExplain(identity, verb, resource, name, tenant, dict(claims or {})))

    async def who_am_i(self) -> SessionIdentity:
        """Tell who the broker takes this client for.

        Returns:
            The identity, its tenant and its roles.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> (await bus.auth.who_am_i()).identity
            'local'
        """
        return await self._broker.request(WhoAmI())
