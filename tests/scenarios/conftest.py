"""For all scenarios: no secret that a server was given, or gave to a client, shows up in what is logged."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.broker import security_admin, webhooks
from headrace.gateways.login_guard import LoginGuard

_SHORT = 16
"""Credentials that are shorter are made up by tests, and could be part of any text."""


class SecretDetector(logging.Handler):
    """Remembers every secret, and every logged line that has one of them."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self._secrets: set[str] = set()
        self._lines: list[str] = []
        self._formatter = logging.Formatter()

    def add(self, *secrets: str) -> None:
        """Look for these."""
        for secret in secrets:
            parts = (secret, secret.removeprefix("whsec_"), secret.rpartition("_")[2], secret.rpartition(".")[2])
            self._secrets.update(part for part in parts if len(part) >= _SHORT)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line with all that a format could show of it."""
        self._lines.append(f"{self._formatter.format(record)} {vars(record)}")

    def leaks(self) -> list[str]:
        """The lines that have a secret."""
        return [line for line in self._lines if any(secret in line for secret in self._secrets)]


@pytest.fixture(autouse=True)
def detector(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecretDetector]:
    """Fails the test if a secret was logged by anything in this process: servers, clients, or the push service."""
    detector = SecretDetector()

    def told(make: Callable[..., Any], pick: Callable[[Any], str]) -> Callable[..., Any]:
        def make_and_tell(*args: Any) -> Any:
            made = make(*args)
            detector.add(pick(made))
            return made

        return make_and_tell

    monkeypatch.setattr(security_admin, "new_token", told(security_admin.new_token, lambda made: made[1]))
    monkeypatch.setattr(webhooks, "_new_secret", told(webhooks._new_secret, str))
    authenticate = LoginGuard.__call__

    def watched(self: LoginGuard, mechanism: str, credentials: bytes, peer: Any) -> Any:
        if mechanism == "bearer":
            detector.add(credentials.decode("latin-1"))
        return authenticate(self, mechanism, credentials, peer)

    monkeypatch.setattr(LoginGuard, "__call__", watched)
    logger = logging.getLogger("headrace")
    logger.addHandler(detector)
    try:
        yield detector
    finally:
        logger.removeHandler(detector)
    assert not detector.leaks(), "a secret is in the log"
