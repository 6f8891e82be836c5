"""A copy of shared security definitions in the journal: an exported data directory is as safe as its cluster was."""

from typing import Protocol, TypeVar

from headrace.broker.definition_facts import DefinitionsChanged
from headrace.broker.definitions import JournalDefinitions
from headrace.broker.ledger import Ledger
from headrace.model.errors import HeadraceError
from headrace.security.definitions import DefinitionsChange, DefinitionsStore, SecurityDefinitions

_Value = TypeVar("_Value")


class SharedDefinitionsStore(DefinitionsStore, Protocol):
    """Definitions that several brokers share, elsewhere than in their journals."""

    def seed(self, document: SecurityDefinitions) -> None:
        """Store a first document, unless there is one; raises if that is not possible."""


class DefinitionsMirror:
    """Records in the journal what the shared definitions are; whoever opens it without a cluster finds them there.

    A journal that was imported has definitions, and its new cluster has none: they become the cluster's.
    """

    def __init__(self, shared: SharedDefinitionsStore, ledger: Ledger) -> None:
        self._ledger = ledger
        mine, theirs = ledger.state.definitions.document, shared.load()
        if mine.version and not theirs.version:
            shared.seed(mine)  # before anybody is served: without definitions everybody may do everything
        self._record(shared.load())
        shared.on_change(self._record)

    def _record(self, document: SecurityDefinitions) -> None:
        before = self._ledger.state.definitions.document
        if document.version == before.version:
            return
        fact = DefinitionsChanged(document.version, _difference(before, document))
        try:
            self._ledger.record(self._ledger.now_us, fact)
        except HeadraceError as error:  # the next change, or the next start, records it
            text = "security definitions not copied to the journal"
            self._ledger.failures.note("definitions", error, text)
        else:
            self._ledger.failures.worked("definitions")


def opened_definitions(shared: SharedDefinitionsStore | None, ledger: Ledger) -> DefinitionsStore:
    """The definitions of a broker: those that nodes of a cluster share, or those in its journal."""
    if shared is None:
        return JournalDefinitions(ledger)
    DefinitionsMirror(shared, ledger)
    return shared


def _difference(before: SecurityDefinitions, after: SecurityDefinitions) -> DefinitionsChange:
    """The change that makes one document of the other."""
    return DefinitionsChange(
        enabled=after.enabled,
        tenants=_changed(before.tenants, after.tenants),
        roles=_changed(before.roles, after.roles),
        bound=[one for one in after.bindings if one not in before.bindings],
        unbound=[one for one in before.bindings if one not in after.bindings],
        tokens=_changed(before.tokens, after.tokens),
    )


def _changed(before: dict[str, _Value], after: dict[str, _Value]) -> dict[str, _Value | None]:
    return {
        **{name: None for name in before if name not in after},
        **{name: value for name, value in after.items() if before.get(name) != value},
    }
