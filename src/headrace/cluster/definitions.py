"""The security definitions of a cluster: one document in the shared store, changed by compare-and-set."""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from headrace.model.cluster_errors import StoreUnavailable, StoreWentBack
from headrace.model.errors import HeadraceError, LimitExceeded, VersionConflict
from headrace.security.definitions import DefinitionsChange, DefinitionsOutcome, SecurityDefinitions
from headrace.storage.replicated.keys import definitions_key
from headrace.storage.stores.store import OBJECT_BYTES_MAX, KeyExists, SharedStore, VersionMismatch

logger = logging.getLogger("headrace.cluster")

_FORMAT = 1
_TRIES = 5
_RETRY_S = 0.2
"""The pause after the first try of a change that the store did not answer; each further one is twice as long."""


class DefinitionsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The object `CLUSTER/definitions`, as JSON."""

    format: int = _FORMAT
    nonce: str = ""
    """Another random text with each change, so that a writer recognises its own after a lost answer."""
    document: SecurityDefinitions = SecurityDefinitions()


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(DefinitionsRecord)


class DefinitionsWorker(Protocol):
    """A thread that runs jobs one after the other."""

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job, which handles its own errors."""

    def dismiss(self) -> None:
        """End the thread after its jobs."""


class DefinitionsPorts(Protocol):
    """What is needed of the ports of the broker that uses the definitions."""

    def call_threadsafe(self, call: Callable[[], None]) -> None:
        """Run a callback on the broker's thread."""

    def new_worker(self, name: str) -> DefinitionsWorker:
        """A thread for changes, which wait for the store."""


class SharedDefinitions:
    """The document in a shared store; a `DefinitionsStore` of one broker at a time.

    `load` never waits: it returns the document as it was last seen, also while the store is away. Changes run on a
    worker thread. `poll` finds out what other nodes have changed; a thread calls it every second, once `start` is.
    """

    def __init__(self, store: SharedStore, cluster: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Read the document, which waits for the store; one that is not there yet is empty."""
        self._store = store
        self._key = definitions_key(cluster)
        self._sleep = sleep
        self._lock = threading.Lock()
        """Held while the store is asked: what was read last is then what is compared."""
        self._version = ""
        """Of the object in the store; empty: there is none."""
        self._record = DefinitionsRecord()
        self._read()
        self._document = self._record.document
        """As the broker's thread knows it."""
        self._listeners: list[Callable[[SecurityDefinitions], None]] = []
        self._ports: DefinitionsPorts | None = None
        self._worker: DefinitionsWorker | None = None
        self._is_away = False
        self._closed = threading.Event()
        self._polling: threading.Thread | None = None

    def attach(self, ports: DefinitionsPorts) -> "SharedDefinitions":
        """Serve the broker that has these ports; the listeners of one before are forgotten."""
        self._listeners = []
        self._ports = ports
        if self._worker is not None:
            self._worker.dismiss()
        self._worker = ports.new_worker("headrace-definitions")
        self._document = self._record.document
        return self

    def detach(self) -> None:
        """Tell the broker nothing more, as it has ended; what changes from now on is for the next one."""
        self._listeners = []
        self._ports = None

    # Called by the broker, on its thread.

    def load(self) -> SecurityDefinitions:
        """The document as it was last seen."""
        return self._document

    def on_change(self, listener: Callable[[SecurityDefinitions], None]) -> None:
        """Call this on the broker's thread with the document after each change, of whichever node."""
        self._listeners.append(listener)

    def compare_and_set(
        self,
        change: DefinitionsChange,
        expected_version: int,
        now_us: int,  # noqa: ARG002
        done: DefinitionsOutcome,
    ) -> None:
        """Change the document if it has this version; calls back when the store has it, or with the error.

        StoreUnavailable means that nobody knows yet whether it was changed.
        """
        before = self._document
        try:
            if before.version != expected_version:
                raise _conflict(before.version, expected_version)
            after = before.changed(change, before.version + 1)
            after.check_room()
            record = DefinitionsRecord(nonce=secrets.token_hex(8), document=after)
            data = _encoded(record)
        except HeadraceError as error:
            done(error)
            return
        assert self._worker is not None, "attach it to a broker first"
        self._worker.submit(partial(self._change, record, data, done))

    def seed(self, document: SecurityDefinitions) -> None:
        """Put the document of an imported journal into the store, unless there is one; waits for the store."""
        record = DefinitionsRecord(nonce=secrets.token_hex(8), document=document)
        with self._lock:
            if not self._version:
                self._put(record, _encoded(record))
            self._document = self._record.document

    # Called on other threads.

    def start(self, interval_s: float = 1.0) -> None:
        """Poll on a thread of its own from now on."""
        self._polling = threading.Thread(
            target=self._poll_often, args=(interval_s,), name="headrace-definitions-poll", daemon=True
        )
        self._polling.start()

    def close(self) -> None:
        """End the threads; the document stays as it is."""
        self._closed.set()
        if self._worker is not None:
            self._worker.dismiss()
            self._worker = None
        if self._polling is not None:
            self._polling.join()

    def refresh(self) -> None:
        """Read the document before a broker is attached; raises StoreUnavailable.

        What the owner before has acknowledged a moment ago counts for the next one.
        """
        with self._lock:
            self._read()

    def poll(self) -> None:
        """Read the document, and tell the broker if it was changed elsewhere; while the store is away it stays."""
        try:
            with self._lock:
                changed = self._read()
        except HeadraceError as error:
            if not self._is_away:
                self._is_away = True
                logger.warning("security definitions not read; the last known ones count  reason=%s", error)
            return
        self._is_away = False
        if changed:
            self._tell(lambda: None)

    def _poll_often(self, interval_s: float) -> None:
        while not self._closed.wait(interval_s):
            self.poll()

    def _change(self, record: DefinitionsRecord, data: bytes, done: DefinitionsOutcome) -> None:
        """Put a changed document into the store, on the worker thread, and tell the broker what came of it."""
        outcome: SecurityDefinitions | HeadraceError
        try:
            with self._lock:
                self._put(record, data)
            outcome = record.document
        except HeadraceError as error:
            outcome = error
        except Exception:
            logger.exception("security definitions not changed")
            outcome = StoreUnavailable("the security definitions could not be changed; the log of the node says why")
        self._tell(lambda: done(outcome))

    def _put(self, record: DefinitionsRecord, data: bytes) -> None:
        """Replace what was read last; raises VersionConflict if another node was first.

        A try that was not answered is repeated with the same bytes: if it had worked, the nonce tells.
        """
        version, expected = self._version, self._record.document.version
        if record.document.version <= expected:
            raise _conflict(expected, record.document.version - 1)
        for number in range(_TRIES):
            try:
                try:
                    if version:
                        self._version = self._store.replace(self._key, data, version)
                        self._record = record
                    else:
                        self._store.put_new(self._key, data)
                        self._read()
                except (VersionMismatch, KeyExists):
                    self._read()
                if self._record.nonce == record.nonce:
                    return
                raise _conflict(self._record.document.version, record.document.version - 1)
            except StoreUnavailable as error:
                failure = error
                self._sleep(_RETRY_S * 2**number)
        raise StoreUnavailable(
            f"the shared store did not answer ({failure}), so it is not known whether the security definitions were "
            "changed: look at them when it is back, and repeat the change if needed"
        )

    def _read(self) -> bool:
        """Read the object; whether it was another one."""
        found = self._store.get(self._key)
        if found is None and not self._version:
            return False
        record = None if found is None else _decoded(found.data)
        if found is None or record is None or record.document.version < self._record.document.version:
            raise StoreWentBack(
                f"{self._key} in {self._store.location} is gone, or older than version "
                f"{self._record.document.version}, which this node has seen; was the store restored from a backup?"
            )
        is_other = found.version != self._version
        self._version, self._record = found.version, record
        return is_other

    def _tell(self, then: Callable[[], None]) -> None:
        """Pass the document to the broker's thread and its listeners there, and then call back."""
        ports = self._ports
        if ports is not None:
            ports.call_threadsafe(partial(self._adopt, self._record.document, then))

    def _adopt(self, document: SecurityDefinitions, then: Callable[[], None]) -> None:
        if document.version > self._document.version:
            self._document = document
            for listener in self._listeners:
                listener(document)
        then()


def _conflict(found: int, expected: int) -> VersionConflict:
    return VersionConflict(
        f"the security definitions have version {found}, not {expected}: read them again, and repeat the change",
        version=found,
    )


def _encoded(record: DefinitionsRecord) -> bytes:
    data = _encode(record)
    if len(data) > OBJECT_BYTES_MAX:
        raise LimitExceeded(
            f"the security definitions of a cluster have at most {OBJECT_BYTES_MAX} bytes, not {len(data)}; remove "
            "tokens or roles that nobody uses"
        )
    return data


def _decoded(data: bytes) -> DefinitionsRecord:
    try:
        record = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StoreUnavailable(f"the security definitions in the shared store cannot be read: {error}") from error
    if record.format > _FORMAT:
        raise StoreUnavailable(
            f"the security definitions have format {record.format}, and this Headrace knows {_FORMAT}: upgrade the node"
        )
    return record
