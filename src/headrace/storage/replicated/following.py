"""The follower of a shard: applies the committed log to a directory as it grows, and ends older epochs for a claim."""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from headrace.model.errors import CorruptFile, Fenced, StoreWentBack
from headrace.storage.replicated.epochs import StoredManifest, checkpoint_position, read_manifest_steps
from headrace.storage.replicated.holes import proof_steps
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.log_size import LogSize
from headrace.storage.replicated.operations import (
    SEAL,
    DamagedObject,
    Operation,
    WalHeader,
    decode_object,
    encode_seal,
)
from headrace.storage.replicated.steps import GetObjects, PutNew, Steps, perform
from headrace.storage.stores.store import KeyExists, SharedStore, StoredObject

_READ_AHEAD_LARGE = 4
"""So many large objects are read at once while the follower catches up, as an owner has in flight."""
_READ_AHEAD_BYTES = 4 << 20
"""They are large if those that were read last together have more bytes."""
_LOOKS = 16
"""Of so many polls in a row that found nothing, one asks whether the next object was deleted."""


class FollowerBehind(Exception):
    """The objects that come next were deleted, or the directory is in doubt: restore it from the checkpoint."""


class OperationTarget(Protocol):
    """What a follower applies operations to: an Applier."""

    def apply(self, operations: Iterable[Operation]) -> None: ...
    def begin_epoch(self) -> None: ...


class ShardFollower:
    """Applies the committed log of a shard, from the position of a checkpoint, in order and without gaps.

    The target must have exactly the state at that position. One thread at a time. After any error but StoreUnavailable
    the directory is in doubt and poll raises FollowerBehind.
    """

    def __init__(
        self,
        store: SharedStore,
        keys: ShardKeys,
        target: OperationTarget,
        position: Position = Position(1, 0),  # noqa: B008
        seals: Mapping[int, int] | None = None,
        seen: Position = Position(0, 0),  # noqa: B008
        log_size: LogSize | None = None,
    ) -> None:
        self.store = store
        self.keys = keys
        self.target = target
        self.position = position
        """What has been applied."""
        self.seals = dict(seals or {})
        """The position of the seal of each earlier epoch, which garbage collection must never delete."""
        self.time_us = 0
        """When the last object that was applied was made, by its owner's clock."""
        self.seen = seen
        """The highest position that is known to have been committed."""
        self.log_size = LogSize() if log_size is None else log_size
        """Of what has been applied."""
        self._ahead = 1
        self._idle = _LOOKS - 1
        self._in_doubt = False

    def poll(self, limit: int = sys.maxsize) -> int:
        """Apply the objects that have been committed since, at most so many; returns how many.

        Raises StoreUnavailable, FollowerBehind, and CorruptFile at an object that is damaged, or missing though there
        are later ones; after the latter the directory is as it was before, and poll may be called again.
        """
        return perform(self.store, self.poll_steps(limit))

    def seal_older(self, epoch: int, nonce: bytes, time_us: int) -> None:
        """Apply the rest of all epochs before one that this node has claimed, and seal those that are open.

        Afterwards no other node can commit anything in them, and the position is the beginning of the epoch. After
        StoreUnavailable call again. Raises Fenced if another node has claimed a later epoch, FollowerBehind, and
        CorruptFile at a hole in the log, which is never sealed.
        """
        perform(self.store, self.seal_steps(epoch, nonce, time_us))

    def check_end(self) -> None:
        """Raise CorruptFile if the next object, which is absent, was committed, and FollowerBehind if it was deleted.

        Otherwise the log ends here, as far as anybody can tell.
        """
        perform(self.store, self.end_steps())

    def is_behind(self, stored: StoredManifest | None) -> bool:
        """Whether objects that come next may have been deleted, according to a manifest: restore first."""
        return stored is not None and self.position < checkpoint_position(stored.manifest.oldest)

    def poll_steps(
        self, limit: int = sys.maxsize, end: int = sys.maxsize, stop: Callable[[WalHeader], bool] | None = None
    ) -> Steps[int]:
        """Apply committed objects: at most so many, of epochs before `end`, and before the first that `stop` wants."""
        if self._in_doubt:
            raise FollowerBehind("an object was applied in part")
        applied = 0
        while applied < limit and self.position.epoch < end:
            epoch, objects = self.position
            wanted = range(objects, objects + min(self._ahead, limit - applied))
            found = yield GetObjects([self.keys.wal(epoch, each) for each in wanted])
            for stored in found:
                if stored is None:
                    yield from self._look_behind(applied)
                    return applied
                header, operations = self._decode(stored)
                if stop is not None and header.kind != SEAL and stop(header):
                    return applied
                if header.kind == SEAL:
                    yield from self._pass_seal()
                    break
                self._apply(header, operations)
                self.log_size.add(self.position, len(stored.data))
                applied += 1
            is_large = sum(len(stored.data) for stored in found if stored is not None) > _READ_AHEAD_BYTES
            self._ahead = min(self._ahead * 2, _READ_AHEAD_LARGE if is_large else self.store.reads_at_once)
        return applied

    def seal_steps(self, epoch: int, nonce: bytes, time_us: int) -> Steps[None]:
        """Apply the rest of all epochs before `epoch`, and seal those that are open."""
        stored = yield from read_manifest_steps(self.keys)
        if stored is None or stored.manifest.epoch < epoch:
            raise StoreWentBack(f"{self.keys.manifest} lacks epoch {epoch}, which this node has claimed")
        if self.is_behind(stored):
            raise FollowerBehind(f"{self.position} is before the oldest checkpoint, {stored.manifest.oldest}")
        while self.position.epoch < epoch:
            yield from self.poll_steps(end=epoch)
            at = self.position
            if at.epoch < epoch:
                yield from self.end_steps()
                try:
                    yield PutNew(self.keys.wal(*at), encode_seal(*at, nonce, time_us, epoch))
                except KeyExists:
                    continue  # an object of the epoch's owner, or a seal: it is looked at again
        if stored.manifest.epoch > epoch:
            raise Fenced(f"{stored.manifest.owner} has claimed the shard with epoch {stored.manifest.epoch}")

    def end_steps(self) -> Steps[None]:
        """Make sure that the absence of the next object is the end of the log, and neither deletion nor loss."""
        self._idle = _LOOKS - 1  # until it is known to be the end it is asked each time
        proof = yield from proof_steps(self.keys, self.position)
        if not proof and self.position < self.seen:
            proof = f"position {self.seen}, which this node has seen"
        if self.is_behind((yield from read_manifest_steps(self.keys))):
            raise FollowerBehind(f"the objects from {self.position} on were deleted")
        if proof:
            key = self.keys.wal(*self.position)
            raise CorruptFile(
                f"{key} in {self.store.location} is missing, though the log goes on to {proof}: it was lost. "
                "Put it back from a backup of the store, start a node whose copy is beyond it, or give the cluster up "
                "and restore an earlier moment with `headrace restore --at`",
                key=key,
            )
        self._idle = 0

    def _look_behind(self, applied: int) -> Steps[None]:
        """The next object is absent. At first, and now and then, ask whether that is because it was deleted."""
        self._ahead = 1
        self._idle = 0 if applied and self._idle < _LOOKS - 1 else self._idle + 1
        if self._idle >= _LOOKS:
            yield from self.end_steps()

    def _pass_seal(self) -> Steps[None]:
        """Go on to the next epoch.

        A request to put a seal that was overtaken may arrive late, where an object was and was deleted: such a seal
        ends nothing. So what counts is only one at a position from which nothing had been deleted when it was read.
        """
        epoch, objects = self.position
        stored = yield from read_manifest_steps(self.keys)
        if stored is None or stored.manifest.epoch <= epoch:
            raise StoreWentBack(f"epoch {epoch} of {self.keys.root} is sealed, but the manifest has no later epoch")
        if self.is_behind(stored):
            raise FollowerBehind(f"the objects from {self.position} on were deleted")
        self.seals[epoch] = objects
        self.target.begin_epoch()
        self.position = Position(epoch + 1, 0)

    def _decode(self, stored: StoredObject) -> tuple[WalHeader, list[Operation]]:
        key = self.keys.wal(*self.position)
        try:
            header, operations = decode_object(stored.data)
        except DamagedObject as error:
            raise CorruptFile(f"{key} in {self.store.location} is damaged: {error}", key=key) from error
        if (header.epoch, header.position) != self.position:
            raise CorruptFile(f"{key} in {self.store.location} holds the object {header.epoch}:{header.position}")
        return header, operations

    def _apply(self, header: WalHeader, operations: list[Operation]) -> None:
        self._in_doubt = True
        self.target.apply(operations)
        self._in_doubt = False
        self.position = Position(header.epoch, header.position + 1)
        self.time_us = max(self.time_us, header.time_us)
