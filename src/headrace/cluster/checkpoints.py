"""When the owner of a shard stores a checkpoint: after so many bytes or objects of its log, or so much time."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from headrace.cluster.retry_pause import RetryPause
from headrace.cluster.shards import OwnedShard
from headrace.model.errors import HeadraceError
from headrace.storage.replicated.checkpoint import Checkpointer, NewPool
from headrace.storage.replicated.checkpoint_format import parse_checkpoint_name
from headrace.storage.replicated.epochs import checkpoint_position
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.stores.store import SharedStore

logger = logging.getLogger("headrace.cluster")

OBJECTS_EACH = 10_000
"""After so many WAL objects there is a checkpoint, however small they are: a restart reads each in a request."""
_LOOK_S = 1.0
_RETRY_S = 10.0
_JOIN_S = 5.0
_BLOCKED_S = 30.0
"""A follower that is blocked for so long, though the last checkpoint is behind its position, cannot use that one."""
_GAP_S = 5.0
"""A follower that reports again only after so long was not blocked all the time."""

StoreCheckpoint = Callable[[], str]
"""Stores a checkpoint and deletes what is not needed any more; returns the name of the checkpoint."""


def checkpoint_maker(
    store: SharedStore,
    keys: ShardKeys,
    owned: OwnedShard,
    keep_us: int,
    now_us: Callable[[], int],
    new_pool: NewPool = ThreadPoolExecutor,
) -> StoreCheckpoint:
    """What stores the checkpoints of an owned shard, and keeps what is older for so long."""
    checkpointer = Checkpointer(store, keys, owned.epoch, owned.seals, keep_us=keep_us, new_pool=new_pool)

    def store_checkpoint() -> str:
        made = checkpointer.make_from(owned.disk, now_us())
        checkpointer.collect()
        if checkpointer.missing_chunks:
            logger.error(
                "checkpoint is not whole: somebody else deleted chunks that it shares with the one before; uploading "
                "them again  name=%s chunks=%d",
                made.name,
                checkpointer.missing_chunks,
            )
            made = checkpointer.make_from(owned.disk, now_us())
            checkpointer.collect()
        return made.name

    return store_checkpoint


class CheckpointSchedule:
    """A thread that stores checkpoints of a shard that this node owns."""

    def __init__(
        self,
        owned: OwnedShard,
        store_checkpoint: StoreCheckpoint,
        *,
        each_bytes: int,
        each_s: float,
        clock: Callable[[], float],
        now_us: Callable[[], int],
    ) -> None:
        """`clock` measures durations in seconds, `now_us` is the time of day."""
        self._owned = owned
        self._store_checkpoint = store_checkpoint
        self._each_bytes = each_bytes
        self._each_s = each_s
        self._clock = clock
        self._now_us = now_us
        self._ends = threading.Event()
        self._bytes = 0
        """Of the log, at the last checkpoint."""
        self._objects = 0
        self.last_us = _found_us(owned)
        """When the last checkpoint was stored, by this owner or one before, as time of day; 0: none was."""
        # Owners that change often must not put the next one off.
        self._last_s = clock() - (max(now_us() - self.last_us, 0) / 1e6 if self.last_us else 0.0)
        self._position = checkpoint_position(owned.stored.manifest.checkpoint)
        """Of the last checkpoint."""
        self._inherited = inherited_objects(owned)
        """WAL objects of earlier owners behind the last checkpoint."""
        self._inherited_bytes = owned.log_size.behind(self._position)
        """Of these objects."""
        self._wanted = Position(0, 0)
        self._blocked_s = 0.0, 0.0
        """When a follower first and last said that it is blocked, without a gap and a checkpoint in between."""
        self._pause = RetryPause(clock)
        self.made = 0
        self.failures = 0
        self._thread = threading.Thread(target=self._run, name="headrace-checkpoints", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; a checkpoint that is under way is waited for a moment, and left alone otherwise: it does not count."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def age_s(self) -> float | None:
        """How long ago the last checkpoint was stored, by this owner or one before; None if none was."""
        return self._clock() - self._last_s if self.last_us else None

    def want_beyond(self, position: Position) -> None:
        """Store a checkpoint soon if the last is not behind a position: a follower cannot get any further than that."""
        self._wanted = max(self._wanted, position)
        now_s = self._clock()
        if now_s - self._blocked_s[1] > _GAP_S:
            self._blocked_s = now_s, now_s
        self._blocked_s = self._blocked_s[0], now_s

    def is_due(self) -> bool:
        """Whether a checkpoint is to be stored now."""
        statistics = self._owned.writer.statistics()
        objects = statistics.objects - self._objects
        if self._wanted >= self._position or self._blocked_s[1] - self._blocked_s[0] >= _BLOCKED_S:
            return True
        if not objects:
            return False
        is_late = self._clock() - self._last_s >= self._each_s
        is_long = self._inherited + objects >= OBJECTS_EACH
        return is_late or is_long or self._inherited_bytes + statistics.bytes - self._bytes >= self._each_bytes

    def _run(self) -> None:
        pause_s = _LOOK_S
        while not self._ends.wait(pause_s):
            pause_s = _LOOK_S
            if not self.is_due():
                continue
            try:
                self._make()
            except Exception as error:
                if self._owned.writer.failure is not None:
                    return  # fenced or closed: the next owner stores checkpoints
                self.failures += 1
                pause_s = _RETRY_S
                unexpected = None if isinstance(error, HeadraceError | OSError) else error
                if self._pause.is_news(error):
                    logger.warning(
                        "checkpoint not stored; trying again in %g s  reason=%s", _RETRY_S, error, exc_info=unexpected
                    )

    def _make(self) -> None:
        statistics, began = self._owned.writer.statistics(), self._clock()
        name = self._store_checkpoint()
        self._bytes, self._objects = statistics.bytes, statistics.objects
        self._inherited = self._inherited_bytes = 0
        self._position, self._wanted = checkpoint_position(name), Position(0, 0)
        self._blocked_s = 0.0, 0.0
        self._last_s = self._clock()
        self._pause.reset()
        self.last_us = self._now_us()
        self.made += 1
        logger.info("checkpoint stored  name=%s seconds=%.3f", name, self._last_s - began)


def inherited_objects(owned: OwnedShard) -> int:
    """How many WAL objects of earlier epochs are behind the checkpoint that an owner has found."""
    begin = checkpoint_position(owned.stored.manifest.checkpoint)
    return sum(
        objects - (begin.objects if epoch == begin.epoch else 0)
        for epoch, objects in owned.seals.items()
        if epoch >= begin.epoch
    )


def _found_us(owned: OwnedShard) -> int:
    """When the checkpoint was made that an owner has found, as time of day; 0 if there is none."""
    name = owned.stored.manifest.checkpoint
    return parse_checkpoint_name(name).time_us if name else 0
