"""The protocol of a shard in simulated worlds, and wrong variants of it, which these worlds must find."""

import pytest
from tests.faults.wal_world import ProtocolBroken, ValueTarget, Variant, run_world

from headrace.storage.replicated.epochs import read_manifest_steps
from headrace.storage.replicated.following import ShardFollower
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.operations import decode_object, encode_seal
from headrace.storage.replicated.steps import GetObject, ListNames, PutNew, Steps
from headrace.storage.replicated.wal import IN_FLIGHT_MAX, Waiter, WriteAheadLog
from headrace.storage.stores.memory import MemoryStore
from headrace.storage.stores.store import KeyExists, StoredObject

WORLDS = 600
FOUND_WITHIN = 500


def run_worlds(seeds: range) -> None:
    """Run worlds, and make sure that what is to be tested has happened in them."""
    worlds = [run_world(seed) for seed in seeds]

    def mean(name: str) -> float:
        return float(sum(getattr(world, name) for world in worlds)) / len(worlds)

    assert mean("acks") > 50
    assert mean("reads") > 8
    assert mean("epochs") > 3
    assert mean("checkpoints") > 0.5
    assert mean("deleted") > 8
    assert mean("restores") > 5


def test_worlds() -> None:
    run_worlds(range(WORLDS))


@pytest.mark.long
def test_many_worlds() -> None:
    run_worlds(range(WORLDS, 3_000))


def test_a_hole_that_a_stranger_made_is_noticed_and_never_sealed() -> None:
    worlds = [run_world(seed, has_stranger=True) for seed in range(150)]
    assert sum(1 for world in worlds if world.lost) > 100
    assert sum(1 for world in worlds if world.noticed) > 50


def test_a_world_is_a_function_of_its_seed() -> None:
    first, second = run_world(7), run_world(7)
    assert first.log == second.log
    assert first.history == second.history


# Wrong variants.


class NoEpochInKey(ShardKeys):
    """Keys of the log without the epoch."""

    def wal(self, epoch: int, position: int) -> str:
        del epoch
        return f"{self.wal_prefix}{position:012d}"


class EpochlessFollower(ShardFollower):
    """Reads one sequence of positions; whoever claims goes on at the first that is free."""

    def poll_steps(self, limit: int = 1 << 30, *_: object, **__: object) -> Steps[int]:
        applied = 0
        while applied < limit:
            found = yield GetObject(self.keys.wal(*self.position))
            if found is None:
                break
            self.target.apply(decode_object(found.data)[1])
            self.position = Position(1, self.position.objects + 1)
            applied += 1
        return applied

    def seal_steps(self, epoch: int, nonce: bytes, time_us: int) -> Steps[None]:
        del epoch, nonce, time_us
        yield from self.poll_steps()


class WithoutEpochs(Variant):
    """No epoch in the key."""

    has_checkpoints = False
    keys = NoEpochInKey("sim", 0)

    def new_wal(self, epoch: int, nonce: bytes, at: int) -> WriteAheadLog:
        return WriteAheadLog(epoch, nonce, at)

    def new_follower(self, target: ValueTarget, position: Position, seals: dict[int, int]) -> ShardFollower:
        return EpochlessFollower(MemoryStore(), self.keys, target, position, seals)


class HastyLog(WriteAheadLog):
    """Takes an object as committed when the store has it, whatever is before it."""

    def acknowledge(self, position: int) -> list[Waiter]:
        if self.failure is not None:
            return []
        put = self._put.pop(position)
        self._in_flight -= 1
        done = [waiter for sequence, waiter in self._waiters if put.last - put.operations < sequence <= put.last]
        self._waiters = [each for each in self._waiters if each[1] not in done]
        self.committed = max(self.committed, put.last)
        return done


class OutOfOrder(Variant):
    """Acknowledgements out of order."""

    def new_wal(self, epoch: int, nonce: bytes, _at: int) -> WriteAheadLog:
        return HastyLog(epoch, nonce)


class WideLog(WriteAheadLog):
    """Counts the puts that were not answered, however far they run ahead of one that is late."""

    @property
    def has_put(self) -> bool:
        return self.in_flight < IN_FLIGHT_MAX and self.failure is None and self.recorded > self._cut_sequence


class RunAhead(Variant):
    """Objects are put far behind one that is late, and may never come."""

    def new_wal(self, epoch: int, nonce: bytes, _at: int) -> WriteAheadLog:
        return WideLog(epoch, nonce)


class GapSealer(ShardFollower):
    """Puts the seal behind the last object that there is, though one before it is absent."""

    def end_steps(self) -> Steps[None]:
        yield from ()

    def seal_steps(self, epoch: int, nonce: bytes, time_us: int) -> Steps[None]:
        yield from read_manifest_steps(self.keys)
        while self.position.epoch < epoch:
            yield from self.poll_steps(end=epoch)
            at = self.position
            if at.epoch < epoch:
                beyond = yield ListNames(self.keys.epoch_prefix(at.epoch), self.keys.wal(*at))
                end = self.keys.position(beyond[-1])[1] + 1 if beyond else at.objects
                try:
                    yield PutNew(self.keys.wal(at.epoch, end), encode_seal(at.epoch, end, nonce, time_us, epoch))
                except KeyExists:
                    continue
                if beyond:
                    self.seals[at.epoch] = end
                    self.position = Position(at.epoch + 1, 0)


class SealPastGap(Variant):
    """Sealing past a gap."""

    def new_follower(self, target: ValueTarget, position: Position, seals: dict[int, int]) -> ShardFollower:
        return GapSealer(MemoryStore(), self.keys, target, position, seals)


class BarrierAtIssued(Variant):
    """A read barrier that looks at an object already issued."""

    def barrier_position(self, wal: WriteAheadLog) -> int | None:
        return wal.committed_objects - 1 if wal.committed_objects else None

    def passes_barrier(self, wal: WriteAheadLog, found: StoredObject | None) -> bool:
        return found is not None and decode_object(found.data)[0].nonce == wal.nonce


class HashesOnly(Variant):
    """Chunks named by their hash alone, so that a request to delete one may meet another upload of it."""

    def chunk_upload(self, epoch: int, upload: str) -> str:
        del epoch, upload
        return f"{0:08d}"


WRONG: list[tuple[type[Variant], str]] = [
    (WithoutEpochs, "behind one of epoch"),
    (OutOfOrder, "which is not committed|another state"),
    (RunAhead, "is missing, though the log goes on"),
    (SealPastGap, "not committed|another state"),
    (BarrierAtIssued, "were acknowledged before"),
    (HashesOnly, "is not whole"),
]


@pytest.mark.parametrize(("wrong", "why"), WRONG, ids=[wrong.__name__ for wrong, _ in WRONG])
def test_a_wrong_variant_is_found(wrong: type[Variant], why: str) -> None:
    with pytest.raises(ProtocolBroken, match=why):
        run_all(range(FOUND_WITHIN), wrong)


def run_all(seeds: range, wrong: type[Variant]) -> None:
    for seed in seeds:
        run_world(seed, wrong())
