"""Verifies JWTs for the builtin authenticator, with keys from a JWKS file or URL that are loaded again when needed."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from headrace.broker.pending_answer import PendingAnswer
from headrace.gateways.authentication import Peer
from headrace.model.errors import Busy, HeadraceError, InvalidArgument, NotAuthenticated
from headrace.model.identity import Identity
from headrace.security.jwt_keys import JWKS_BYTES_MAX, JwtKey, load_joserfc, parse_jwks
from headrace.security.jwt_verifier import JwtRules, UnknownKey, verify_jwt

logger = logging.getLogger("headrace.security")

_REFRESH_US = 300_000_000
"""How often keys are fetched from a URL while tokens come."""
_RETRY_US = 10_000_000
"""Keys are fetched at most this often, however many tokens name keys that are not known."""
_FETCH_S = 10.0
_POLL_US = 1_000_000
"""How often a file is looked at, while tokens come."""

Fetch = Callable[[], Awaitable[bytes]]


class FileKeys:
    """The keys of a JWKS file, read again when it has changed. A file that is wrong changes nothing."""

    def __init__(self, path: str) -> None:
        """Read the file; raises InvalidArgument if it has no keys."""
        self._path = path
        self._seen_us = 0
        self._signature: tuple[int, int, int] | None = None
        self.keys: dict[str, JwtKey] = {}
        try:
            self._load()
        except OSError as error:
            raise InvalidArgument(f"jwt_keys: {path} cannot be read: {error.strerror}") from error

    def refresh(self, now_us: int) -> "PendingAnswer[None] | None":
        """Read the file if it has changed; the keys are there when it returns."""
        if now_us - self._seen_us >= _POLL_US:
            self._seen_us = now_us
            try:
                self._load()
            except (OSError, InvalidArgument) as error:
                logger.warning("JWT keys not read; the last ones count  path=%s reason=%s", self._path, error)
        return None

    def wanted(self, now_us: int) -> "PendingAnswer[None] | None":
        """Look again, because a token names a key that is not known."""
        return self.refresh(now_us)

    def _load(self) -> None:
        status = os.stat(self._path)
        signature = status.st_mtime_ns, status.st_size, status.st_ino
        if signature == self._signature:
            return
        self._signature = signature
        with open(self._path, "rb") as file:
            self.keys = parse_jwks(file.read(JWKS_BYTES_MAX + 1))


class UrlKeys:
    """The keys of a JWKS URL. They are fetched on the event loop, at a bounded rate; the last good ones stay."""

    def __init__(self, url: str, fetch: Fetch) -> None:
        self._url = url
        self._fetch = fetch
        self._fetched_us: int | None = None
        self._fetching: PendingAnswer[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self.keys: dict[str, JwtKey] = {}

    def refresh(self, now_us: int) -> "PendingAnswer[None] | None":
        """Fetch the keys now and then; what it returns resolves when there are some at all."""
        if self._fetched_us is None or now_us - self._fetched_us >= _REFRESH_US:
            fetching = self.wanted(now_us)
            return None if self.keys else fetching
        return None if self.keys else self._fetching

    def wanted(self, now_us: int) -> "PendingAnswer[None] | None":
        """Fetch the keys, because a token names one that is not known; None if they were fetched just now."""
        if self._fetching is not None:
            return self._fetching
        if self._fetched_us is not None and now_us - self._fetched_us < _RETRY_US:
            return None
        self._fetched_us = now_us
        self._fetching = fetching = PendingAnswer[None]()
        self._task = asyncio.get_running_loop().create_task(self._run(fetching))
        return fetching

    async def _run(self, fetching: PendingAnswer[None]) -> None:
        try:
            async with asyncio.timeout(_FETCH_S):
                self.keys = parse_jwks(await self._fetch())
        except (HeadraceError, OSError) as error:  # a time-out is an OSError
            logger.warning("JWT keys not fetched; the last ones count  url=%s reason=%s", self._url, error)
        finally:
            self._fetching = None
            fetching.resolve(None)  # there are new keys, or there are none


class JwtAuthenticator:
    """Says who a client is by its JWT."""

    def __init__(self, rules: JwtRules, source: FileKeys | UrlKeys, now_us: Callable[[], int]) -> None:
        load_joserfc("jws")  # not when the first client comes
        self._rules = rules
        self._source = source
        self._now_us = now_us

    def __call__(self, token: bytes, peer: Peer) -> "Identity | PendingAnswer[Identity]":  # noqa: ARG002
        """Verify a token; one whose key is not known is verified again with newer keys, if there are some."""
        loading = self._source.refresh(self._now_us())
        if loading is None:
            try:
                return self._verify(token)
            except UnknownKey:
                loading = self._source.wanted(self._now_us())
                if loading is None:
                    # A file was read again; keys from a URL are as new as they may be.
                    return self._verify_at_last(token)
        answer: PendingAnswer[Identity] = PendingAnswer()

        def loaded(_: object) -> None:
            try:
                answer.resolve(self._verify_at_last(token))
            except HeadraceError as error:
                answer.resolve(error)

        loading.then(loaded)
        return answer

    def _verify_at_last(self, token: bytes) -> Identity:
        """Verify a token with the keys that there are."""
        try:
            return self._verify(token)
        except UnknownKey as error:
            if self._source.keys:
                raise NotAuthenticated(str(error)) from error
            told = "JWTs cannot be verified yet, as their keys could not be fetched: try again in a moment"
            raise Busy(told) from error  # says nothing about the token

    def _verify(self, token: bytes) -> Identity:
        try:
            return verify_jwt(token, self._source.keys, self._rules, self._now_us())
        except RecursionError as error:
            raise NotAuthenticated("the JWT cannot be decoded") from error


def url_fetcher(url: str, user_agent: str) -> Fetch:
    """Fetches a URL with the bounds of time and size of all that the broker sends; redirects are not followed."""
    from headrace.push.address_guard import AddressGuard
    from headrace.push.http_client import OutgoingClient

    client: OutgoingClient | None = None

    async def fetch() -> bytes:
        nonlocal client
        if client is None:  # the operator has named the host: it may be in any network
            client = OutgoingClient(AddressGuard(["0.0.0.0/0", "::/0"]), user_agent=user_agent)
        response = await client.send("GET", url, {"Accept": "application/json"}, timeout_s=_FETCH_S)
        if response.status != 200:
            raise InvalidArgument(f"the URL answers with the status {response.status}")
        return response.body

    return fetch
