"""What of a shard is kept, and the deletion of the rest. Only the owner of an epoch deletes.

A request to delete may arrive late, when its sender is not the owner any more: so only what can never be needed again
is deleted. Those are checkpoints that the manifest has passed, chunks that no kept checkpoint and no upload under way
refers to, and WAL objects with operations before the oldest kept checkpoint. Seals stay for ever: they stop owners of
old epochs that wake up.
"""

from collections.abc import Collection, Mapping, Sequence

from headrace.storage.replicated.checkpoint_format import parse_checkpoint_name, upload_epoch
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.steps import DeleteObjects, ListNames, Steps

RESTORE_US = 600 * 1_000_000
"""Checkpoints are kept for at least so long, for nodes that are being restored from them."""
KEPT_IN_WINDOW = 12
"""About as many checkpoints are kept in the time for which backups are kept: WAL objects lead from one to the next."""
_BATCH = 500


def choose_kept(names: Sequence[str], now_us: int, keep_us: int) -> list[str]:
    """The checkpoints to keep, of these in their order: the newest, and some for every moment since `keep_us` ago."""
    times = {name: parse_checkpoint_name(name).time_us for name in names}
    old = [at for at, name in enumerate(names[:-1]) if is_outdated(name, now_us, keep_us)]
    kept = [names[at] for at in old[-1:]]  # leads to the first moment of the window
    for name in names[old[-1] + 1 if old else 0 : -1]:
        if not kept or times[name] - times[kept[-1]] >= max(keep_us, RESTORE_US) // KEPT_IN_WINDOW:
            kept.append(name)
    return [*kept, *names[-1:]]


def is_outdated(name: str, now_us: int, keep_us: int) -> bool:
    """Whether a checkpoint is so old that nothing before it is kept."""
    return parse_checkpoint_name(name).time_us <= now_us - max(keep_us, RESTORE_US)


def list_steps(prefix: str, after: str = "") -> Steps[list[str]]:
    """All keys with a prefix."""
    found: list[str] = []
    while True:
        page: list[str] = yield ListNames(prefix, after)
        if not page:
            return found
        found += page
        after = page[-1]


def delete_steps(keys: Sequence[str], limit: int) -> Steps[int]:
    """Delete objects, in batches, at most so many; the result is how many."""
    keys = keys[: max(limit, 0)]
    for begin in range(0, len(keys), _BATCH):
        yield DeleteObjects(keys[begin : begin + _BATCH])
    return len(keys)


def collect_checkpoints_steps(keys: ShardKeys, current: str, kept: Collection[str], limit: int) -> Steps[int]:
    """Delete checkpoints before the manifest's that are not kept.

    Later ones stay: a request to put one into the manifest may still be under way.
    """
    found = yield from list_steps(keys.checkpoint_prefix)
    wanted = {keys.checkpoint(name) for name in kept}
    gone = [key for key in found if key < keys.checkpoint(current) and key not in wanted]
    return (yield from delete_steps(gone, limit))


def list_chunks_steps(keys: ShardKeys) -> Steps[list[str]]:
    """The names of all chunks that are in the store."""
    found = yield from list_steps(keys.chunk_prefix)
    return [key.removeprefix(keys.chunk_prefix) for key in found]


def collect_chunks_steps(
    keys: ShardKeys, epoch: int, listed: Sequence[str], needed: Collection[str], limit: int
) -> Steps[int]:
    """Delete the listed chunks of this and earlier epochs that are not needed; later ones are a later owner's."""
    gone = [keys.chunk(name) for name in listed if name not in needed and upload_epoch(name) <= epoch]
    return (yield from delete_steps(gone, limit))


def collect_wal_steps(
    keys: ShardKeys, oldest: Position, seals: Mapping[int, int], limit: int, after: str = ""
) -> Steps[int]:
    """Delete the WAL objects before a position, but no seal.

    Of an epoch whose seal is not known nothing is deleted. What is behind a seal was never committed, and goes, too.
    """
    deleted = 0
    while deleted < limit:
        page: list[str] = yield ListNames(keys.wal_prefix, after)
        gone = []
        for key in page:
            at = Position(*keys.position(key))
            is_older = at.epoch < oldest.epoch and at.objects != seals.get(at.epoch, at.objects)
            if is_older or (at.epoch == oldest.epoch and at < oldest):
                gone.append(key)
        deleted += yield from delete_steps(gone, limit - deleted)
        if not page or Position(*keys.position(page[-1])) >= oldest:
            break
        after = page[-1]
    return deleted
