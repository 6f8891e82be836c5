"""The security definitions of a single broker, in its journal."""

from collections.abc import Callable

from headrace.broker.definition_facts import DefinitionsChanged
from headrace.broker.ledger import Ledger
from headrace.broker.signal import Signal
from headrace.model.errors import HeadraceError, VersionConflict
from headrace.model.requests import Done
from headrace.security.definitions import DefinitionsChange, DefinitionsOutcome, SecurityDefinitions


class JournalDefinitions:
    """Stores the document as facts with what was changed; a `DefinitionsStore`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changed: Signal[SecurityDefinitions] = Signal()

    def load(self) -> SecurityDefinitions:
        """The document as it is now."""
        return self._ledger.state.definitions.document

    def on_change(self, listener: Callable[[SecurityDefinitions], None]) -> None:
        """Call this with the document after each change."""
        self._changed.connect(listener)

    def compare_and_set(
        self, change: DefinitionsChange, expected_version: int, now_us: int, done: DefinitionsOutcome
    ) -> None:
        """Change the document if it has this version; open sessions follow at once, and `done` when it is durable."""
        before = self.load()
        if before.version != expected_version:
            done(
                VersionConflict(
                    f"the security definitions have version {before.version}, not {expected_version}: read them again, "
                    "and repeat the change",
                    version=before.version,
                )
            )
            return
        try:
            before.changed(change, before.version + 1).check_room()
            self._ledger.record(now_us, DefinitionsChanged(before.version + 1, change))
        except HeadraceError as error:
            done(error)
            return
        after = self.load()
        self._changed(after)

        def tell(outcome: Done | HeadraceError) -> None:
            done(outcome if isinstance(outcome, HeadraceError) else after)

        self._ledger.durably(Done()).then(tell)
