"""The heartbeat of a node: a thread that renews its record in the store, and looks at the manifest and at the owner."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from headrace.cluster.node_record import NodeRecord, NodeRecordWriter, UnreadableRecords, read_record, read_records
from headrace.model.errors import CorruptFile, HeadraceError, StoreUnavailable
from headrace.storage.replicated.epochs import StoredManifest, read_manifest
from headrace.storage.replicated.keys import ShardKeys
from headrace.storage.stores.store import SharedStore

logger = logging.getLogger("headrace.cluster")

_ALL_EACH = 5
"""The records of all nodes are read each so many heartbeats, those of the owner at each."""
_AGAIN = 5
"""A round that failed is repeated after this part of an interval, so that one lost request takes nobody's shard."""
_JOIN_S = 2.0


class BeatRound(NamedTuple):
    """What one round has found."""

    began_us: int
    """Before the first request: what was found is not older."""
    ended_us: int
    has_written: bool
    """Whether the node's own record was renewed."""
    manifest: StoredManifest | None
    owner: NodeRecord | None
    """The owner's record; None if there is none, or if this node is the owner."""
    nodes: list[NodeRecord] | None
    """The records of all nodes, in some rounds, if the store answered all requests."""
    problem: str = ""
    """Why the manifest cannot be read, though the store has it; empty: it can."""


class Heartbeat:
    """A thread with a store of its own, so that nothing that is slow elsewhere delays it."""

    def __init__(
        self,
        store: SharedStore,
        keys: ShardKeys,
        writer: NodeRecordWriter,
        cluster: str,
        *,
        interval_s: float,
        make_record: Callable[[], NodeRecord],
        now_us: Callable[[], int],
        done: Callable[[BeatRound], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`done` is called on the thread with what each round has found, `failed` once with an error that ends them.

        A follower looks twice in each interval, and renews its record once; an owner does both once. An owner's round
        calls `done` as soon as it confirms the epoch, and once more with the records of all nodes.
        """
        self._store = store
        self._keys = keys
        self._writer = writer
        self._cluster = cluster
        self._interval_s = interval_s
        self._make_record = make_record
        self._now_us = now_us
        self._done = done
        self._failed = failed
        self._wake = threading.Event()
        self._ends = False
        self._rounds = 0
        self._is_away = False
        self._unreadable = UnreadableRecords()
        self.failures = 0
        """Rounds that the store did not answer."""
        self._thread = threading.Thread(target=self._run, name="headrace-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def hurry(self) -> None:
        """Make a round at once."""
        self._wake.set()

    def stop(self) -> None:
        """Renew the record for the last time, and end; waits for a moment, not for a store that is away."""
        self._ends = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        hurried = True
        while True:
            began_us, ends, has_failed = self._now_us(), self._ends, False
            record = self._make_record()
            writes = hurried or ends or self._rounds % 2 == 0 or bool(record.owns)
            try:
                found = self._round(record, writes=writes)
            except StoreUnavailable as error:
                has_failed = True
                self._tell_away(error)
            except Exception as error:
                if not isinstance(error, HeadraceError):
                    logger.exception("heartbeat failed")
                self._failed(error)
                return
            else:
                self._tell_back()
                self._done(found)
            if ends:
                return
            self._rounds += 1
            interval_s = self._interval_s if record.owns else self._interval_s / 2
            pause_s = self._interval_s / _AGAIN
            if not has_failed:  # from begin to begin: rounds of a slow store must not come too seldom
                pause_s = max(pause_s, interval_s - (self._now_us() - began_us) / 1e6)
            hurried = self._wake.wait(pause_s)
            self._wake.clear()

    def _round(self, record: NodeRecord, *, writes: bool) -> BeatRound:
        began_us = self._now_us()
        if writes:
            self._writer.write(record)
        manifest, problem = None, ""
        try:
            manifest = read_manifest(self._store, self._keys)
        except CorruptFile as error:
            problem = str(error)
        owner = None
        if manifest is not None and manifest.manifest.owner not in ("", record.node):
            owner = read_record(self._store, self._cluster, manifest.manifest.owner, self._unreadable)
        found = BeatRound(began_us, self._now_us(), writes, manifest, owner, None, problem)
        if record.owns:
            self._done(found)
        if record.owns or self._rounds % (2 * _ALL_EACH) == 0:
            with suppress(StoreUnavailable):  # many requests, and nothing that the round is for
                nodes = read_records(self._store, self._cluster, self._unreadable)
                found = found._replace(nodes=nodes, ended_us=self._now_us())
        return found

    def _tell_away(self, error: StoreUnavailable) -> None:
        self.failures += 1
        if not self._is_away:
            self._is_away = True
            logger.warning("store not reached by the heartbeat; trying again  reason=%s", error)

    def _tell_back(self) -> None:
        if self._is_away:
            self._is_away = False
            logger.info("store reached again by the heartbeat")
