"""A node's ownership of a shard: what ends it is gathered here, from whichever thread it comes."""

import threading
from collections.abc import Callable
from functools import partial

from headrace.cluster.claims import OwnerView
from headrace.cluster.epoch_guard import EpochGuard
from headrace.cluster.heartbeat import BeatRound
from headrace.cluster.node_settings import monotonic_us
from headrace.cluster.shards import OwnedShard
from headrace.model.errors import Closed, DiskFull, Fenced, NotServing, StoreUnavailable
from headrace.storage.replicated.manifest import Manifest

Post = Callable[..., None]
"""Calls a function with its arguments on the event loop; from any thread."""


class Ownership:
    """The shard that a node owns, if it does. Made and used on the event loop, except where said."""

    def __init__(self, post: Post, changed: Callable[[], None], on_full: Callable[[DiskFull], None]) -> None:
        """`changed` is called when the ownership may be at its end, `on_full` when the local disk is full."""
        self._post = post
        self._changed = changed
        self._on_full = on_full
        self.owned: OwnedShard | None = None
        self._guard: EpochGuard | None = None
        self._begun_us = 0
        self._last_seen = 0, 0
        """The epoch that the last round of the heartbeat saw in the manifest, and when that round began."""
        self._store_problem = ""
        self._is_fenced = False
        self.disk_failure: BaseException | None = None
        """Why the node's own disk cannot go on; a full one can."""

    def begin_claim(self) -> None:
        """Forget what ended an earlier epoch."""
        self._is_fenced, self.disk_failure, self._store_problem = False, None, ""

    def begin(self, owned: OwnedShard, began_us: int) -> None:
        """Own the shard; the claim began at this time. Rounds of the heartbeat that saw its epoch have confirmed it."""
        epoch, seen_us = self._last_seen
        confirmed_us = max(began_us, seen_us) if epoch == owned.epoch else began_us
        self._guard = EpochGuard(owned.writer, confirmed_us, monotonic_us)
        owned.writer.event_loop_thread = threading.get_ident()
        self._begun_us = monotonic_us()
        owned.disk.on_failure = partial(self._on_disk_failure, owned.epoch)
        owned.disk.on_damage = partial(self._post, self._changed)
        self.owned = owned

    def end(self, owned: OwnedShard, reason: str) -> None:
        """Write nothing more to the store, and own nothing."""
        owned.writer.abandon(Fenced(f"this node does not serve the shard any more: {reason}"))
        if self._guard is not None:
            self._guard.stop()
        self.owned = self._guard = None

    def view(self, node: str, owned: OwnedShard, manifest: Manifest | None) -> OwnerView:
        """What the owner decides by."""
        return OwnerView(
            node=node,
            epoch=owned.epoch,
            confirmed_us=0 if self._guard is None else self._guard.confirmed_us,
            manifest_epoch=owned.epoch if manifest is None else manifest.epoch,
            fenced=self._is_fenced,
            disk_failure="" if self.disk_failure is None else str(self.disk_failure),
            store_problem=self._store_problem,
            damaged=", ".join(owned.disk.damaged),
        )

    def is_unconfirmed(self, longest_us: int) -> bool:
        """Whether the epoch was not confirmed for longer than this; it is no more after the next heartbeat."""
        return self._guard is None or monotonic_us() - self._guard.confirmed_us > longest_us

    def confirm(self, found: BeatRound) -> None:
        """Take a round of the heartbeat; called on its thread, so that it counts also while the event loop waits."""
        owned, guard, stored = self.owned, self._guard, found.manifest
        if stored is not None and found.has_written:
            self._last_seen = stored.manifest.epoch, found.began_us
        if owned is None or guard is None:
            return
        if found.began_us > self._begun_us and (stored is None or stored.manifest.epoch < owned.epoch):
            lacks = "the manifest is missing from the store" if stored is None else "the store went back in time"
            self._store_problem = found.problem or f"{lacks}, though this node owns epoch {owned.epoch}"
        if stored is None:
            return
        if found.has_written and stored.manifest.epoch == owned.epoch:
            guard.confirm(found.began_us)

    def on_fenced(self) -> None:
        """A WAL object met a seal; called on a thread of the writer."""

        def fenced() -> None:
            self._is_fenced = True
            self._changed()

        self._post(fenced)

    def _on_disk_failure(self, epoch: int, error: BaseException) -> None:
        """The node's own disk, or a log on it, has failed in an epoch; called on any thread."""
        if not isinstance(error, Fenced | StoreUnavailable | Closed | NotServing):
            self._post(self._take_disk_failure, epoch, error)

    def _take_disk_failure(self, epoch: int, error: BaseException) -> None:
        if self.owned is None or self.owned.epoch != epoch:
            return
        if isinstance(error, DiskFull):
            self._on_full(error)
            return
        self.disk_failure = self.disk_failure or error
        self._changed()
