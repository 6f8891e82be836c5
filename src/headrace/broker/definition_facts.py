"""The facts about security definitions, and the state that they add up to."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from headrace.broker.fact import Fact
from headrace.security.definitions import DefinitionsChange, SecurityDefinitions

_Entry = TypeVar("_Entry")
_TOGETHER = 100
"""Entries of the document in one fact of a snapshot."""


class DefinitionsChanged(Fact, tag=140):
    """Parts of the security definitions were changed; the version counts the changes."""

    version: int
    change: DefinitionsChange


class TokensUsed(Fact, tag=141):
    """When tokens were last used, by id."""

    used_us: dict[str, int]


DefinitionFact = DefinitionsChanged | TokensUsed


class DefinitionsState:
    """The security definitions, and when tokens were last used."""

    def __init__(self) -> None:
        self.document = SecurityDefinitions()
        self.used_us: dict[str, int] = {}

    def apply(self, fact: DefinitionFact) -> None:
        """Apply a fact."""
        match fact:
            case DefinitionsChanged():
                self.document = self.document.changed(fact.change, fact.version)
                for token_id, token in fact.change.tokens.items():
                    if token is None:
                        self.used_us.pop(token_id, None)
            case TokensUsed():
                known = self.document.tokens
                self.used_us.update({one: at for one, at in fact.used_us.items() if one in known})

    def facts(self) -> Iterator[Fact]:
        """The facts that tell all of it, each with a bounded part of the document."""
        document, version = self.document, self.document.version
        if version == 0:
            return
        yield DefinitionsChanged(version, DefinitionsChange(enabled=document.enabled))
        for tenants in _batches(document.tenants.items()):
            yield DefinitionsChanged(version, DefinitionsChange(tenants=dict(tenants)))
        for name, grants in document.roles.items():
            yield DefinitionsChanged(version, DefinitionsChange(roles={name: grants}))
        for bindings in _batches(document.bindings):
            yield DefinitionsChanged(version, DefinitionsChange(bound=bindings))
        for tokens in _batches(document.tokens.items()):
            yield DefinitionsChanged(version, DefinitionsChange(tokens=dict(tokens)))
        for used in _batches(self.used_us.items()):
            yield TokensUsed(dict(used))


def _batches(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    rest = iter(entries)
    while batch := list(islice(rest, _TOGETHER)):
        yield batch
