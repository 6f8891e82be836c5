"""Simulated worlds for the protocol of a shard: nodes that claim, write, read, follow, make checkpoints and restore.

The store loses, delays and doubles requests; nodes pause in the middle of anything, wake up, die and start again. What
is driven is the real code without I/O: claims, seals, the write-ahead log, the follower, retention. A world is a
function of its seed. Wrong variants of the protocol replace one part each, and a check must find them.
"""

import contextlib
import heapq
import json
import struct
from collections.abc import Callable, Generator, Iterable
from random import Random
from typing import Any, NamedTuple

from headrace.model.errors import CorruptFile, Fenced, HeadraceError, StoreUnavailable
from headrace.storage.replicated.checkpoint_format import CheckpointName, digest_of, parse_checkpoint_name
from headrace.storage.replicated.epochs import (
    StoredManifest,
    checkpoint_position,
    claim_steps,
    read_manifest_steps,
    set_checkpoint_steps,
)
from headrace.storage.replicated.following import FollowerBehind, ShardFollower
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.operations import SEAL, Operation, Write, decode_object, encode_operation
from headrace.storage.replicated.retention import (
    collect_checkpoints_steps,
    collect_chunks_steps,
    collect_wal_steps,
    list_chunks_steps,
)
from headrace.storage.replicated.steps import GetObject, GetObjects, PutNew, StoreRequest
from headrace.storage.replicated.wal import IN_FLIGHT_MAX, PutOutcome, Waiter, WriteAheadLog
from headrace.storage.stores.memory import MemoryStore
from headrace.storage.stores.store import KeyExists, StoredObject, VersionMismatch

KEYS = ShardKeys("sim", 0)
_VALUE = struct.Struct("<Q")
_BLOCK = 16
_LONG_AGO = 250.0
"""Whoever looked for an object before it was put, and was paused then, has gone on after so many ticks."""


class ProtocolBroken(AssertionError):
    """A world came to a state that the protocol excludes."""


class Sleep(NamedTuple):
    """What a process yields to wait."""

    ticks: float


Process = Generator[StoreRequest | Sleep, Any, Any]


class ValueTarget:
    """What a node has applied: the values in the order of the log."""

    def __init__(self, values: Iterable[int] = ()) -> None:
        self.values = list(values)

    def apply(self, operations: Iterable[Operation]) -> None:
        """Take the value of each write."""
        self.values += [_VALUE.unpack(each.data)[0] for each in operations if isinstance(each, Write)]

    def begin_epoch(self) -> None:
        """Nothing depends on the epoch here."""


class Variant:
    """The protocol as it is; subclasses get one thing wrong."""

    has_checkpoints = True
    keys = KEYS

    def new_wal(self, epoch: int, nonce: bytes, _at: int) -> WriteAheadLog:
        """The log of an owner."""
        return WriteAheadLog(epoch, nonce)

    def new_follower(self, target: ValueTarget, position: Position, seals: dict[int, int]) -> ShardFollower:
        """The follower of a node."""
        return ShardFollower(MemoryStore(), self.keys, target, position, seals)

    def barrier_position(self, wal: WriteAheadLog) -> int | None:
        """The position that must be absent for a read; None if only a new object can tell."""
        return None if wal.in_flight or wal.committed < wal.recorded else wal.position

    def passes_barrier(self, _wal: WriteAheadLog, found: StoredObject | None) -> bool:
        """Whether what is at that position proves that nobody else has committed anything."""
        return found is None

    def chunk_upload(self, epoch: int, upload: str) -> str:
        """What the name of a chunk ends with, behind its hash."""
        return f"{epoch:08d}-{upload}"


class World:
    """One run, and the checks."""

    def __init__(self, seed: int, variant: Variant, ticks: int = 700, *, has_stranger: bool = False) -> None:
        """With a stranger, somebody deletes a committed object of the log, which nodes must notice."""
        self.random = Random(seed)
        self.variant = variant
        self.keys = variant.keys
        self.store = MemoryStore()
        self.now = 0.0
        self._ticks = ticks
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.history: dict[str, bytes] = {}
        """The first value of each key of the log, whatever was deleted since."""
        self._put_at: dict[str, float] = {}
        """When it was put."""
        self.log: list[int] = []
        """The values of the committed log."""
        self._at = Position(1, 0)
        self._index: dict[int, int] = {}
        self._last_epoch = 0
        self.recorded: dict[int, list[int]] = {}
        """What the owner of each epoch recorded, in order."""
        self.acknowledged = -1
        """The index of the last value in the log that was acknowledged."""
        self.acks = self.reads = self.restores = self.checkpoints = self.deleted = 0
        self.values = 0
        self.lost = ""
        """The object that a stranger has deleted."""
        self.noticed = 0
        self.fault_rate = self.random.choice((0.0, 0.05, 0.15, 0.3))
        self.nodes = [SimulatedNode(self, name) for name in "abc"]
        if has_stranger:
            self.after(self.random.uniform(100, 400), self._lose)

    @property
    def epochs(self) -> int:
        """How many epochs owners have written in."""
        return len(self.recorded)

    def run(self) -> None:
        """Live until the end, then let one undisturbed node apply everything, and compare."""
        for node in self.nodes:
            node.start()
        self.after(self.random.uniform(5, 60), self._disturb)
        while self._events and self.now < self._ticks:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.extend()
        self._check_prefixes()
        for node in self.nodes:
            node.check()

    def after(self, ticks: float, call: Callable[[], None]) -> None:
        """Call something later."""
        self._count += 1
        heapq.heappush(self._events, (self.now + ticks, self._count, call))

    def _disturb(self) -> None:
        """Let something happen to a node."""
        node = self.random.choice(self.nodes)
        if self.random.random() < 0.4:
            node.kill()
        else:
            node.pause(self.random.uniform(5, 150))
        self.after(self.random.uniform(10, 80), self._disturb)

    def _lose(self) -> None:
        """Delete an object of the log that somebody may still need, and that others prove to have been there.

        It was put long ago: a seal that somebody puts who had looked before that would meet nothing.
        """
        stored = self.store.get(self.keys.manifest)
        oldest = checkpoint_position(json.loads(stored.data)["oldest"] if stored else "")
        kept = [key for key in self.store.names(self.keys.wal_prefix) if self.keys.position(key) >= oldest]
        last = self.keys.position(kept[-1]) if kept else (0, 0)
        self.extend()
        proven = [
            key
            for key in kept
            if self.keys.position(key) < min(self._at, (last[0], last[1] - IN_FLIGHT_MAX + 1))
            and self._put_at[key] < self.now - _LONG_AGO
        ]
        if not proven:
            self.after(20, self._lose)
            return
        self.lost = self.random.choice(proven)
        self.store.delete([self.lost])

    # The store.

    def request(self, request: StoreRequest, answer: Callable[[Any, Exception | None], None]) -> None:
        """Make a request, which arrives once, twice, late or never; so does its answer, or the time is out."""
        fate = self.random.random() / self.fault_rate if self.fault_rate else 1.0
        there, back = self.random.uniform(0.2, 3), self.random.uniform(0.2, 3)
        if fate >= 1.0:
            self.after(there, lambda: self._arrive(request, lambda *found: self.after(back, lambda: answer(*found))))
            return
        if fate < 0.75:  # lost, late, or its answer lost
            self.after(8, lambda: answer(None, StoreUnavailable("no answer")))
        if fate >= 0.25:
            delay = there if fate < 0.45 else self.random.uniform(8, 120)
            self.after(delay, lambda: self._arrive(request, lambda *_: None))
        if fate >= 0.75:  # doubled
            self.after(there, lambda: self._arrive(request, lambda *found: self.after(back, lambda: answer(*found))))

    def _arrive(self, request: StoreRequest, answer: Callable[[Any, Exception | None], None]) -> None:
        try:
            if isinstance(request, GetObjects):
                found: Any = [self.store.get(key) for key in request.keys]
            else:
                found = request.send(self.store)
        except (KeyExists, VersionMismatch) as error:
            answer(None, error)
            return
        if isinstance(request, PutNew) and request.key.startswith(self.keys.wal_prefix):
            self._note_put(request)
        answer(found, None)

    def _note_put(self, put: PutNew) -> None:
        first = self.history.setdefault(put.key, put.data)
        self._put_at.setdefault(put.key, self.now)
        if first == put.data:
            return
        # It was put again after it was deleted: only a seal that came late may do so, where nobody looks any more.
        stored = self.store.get(self.keys.manifest)
        oldest = checkpoint_position(json.loads(stored.data)["oldest"] if stored else "")
        is_late_seal = decode_object(put.data)[0].kind == SEAL and Position(*self.keys.position(put.key)) < oldest
        if not is_late_seal:
            raise ProtocolBroken(f"two values at {put.key}")

    # The checks.

    def extend(self) -> None:
        """Follow the committed log in what was ever put."""
        while (data := self.history.get(self.keys.wal(*self._at))) is not None:
            header, operations = decode_object(data)
            if header.epoch < self._last_epoch:
                raise ProtocolBroken(f"an object of epoch {header.epoch} behind one of epoch {self._last_epoch}")
            if header.kind == SEAL:
                self._at = Position(self._at.epoch + 1, 0)
                continue
            self._last_epoch = header.epoch
            for each in operations:
                if isinstance(each, Write):
                    value = _VALUE.unpack(each.data)[0]
                    self._index[value] = len(self.log)
                    self.log.append(value)
            self._at = Position(self._at.epoch, self._at.objects + 1)

    def acknowledge(self, value: int, epoch: int) -> None:
        """A client is told that its value is safe."""
        self.extend()
        if value not in self._index:
            raise ProtocolBroken(f"the owner of epoch {epoch} acknowledged {value}, which is not committed")
        self.acks += 1
        self.acknowledged = max(self.acknowledged, self._index[value])

    def check_values(self, values: list[int], what: str) -> None:
        """A state is the beginning of the log."""
        self.extend()
        if values != self.log[: len(values)]:
            raise ProtocolBroken(f"{what} has another state than the log")

    def check_read(self, values: list[int], acknowledged: int, what: str) -> None:
        """A linearizable read has everything that was acknowledged, or read, before the question."""
        self.check_values(values, what)
        self.reads += 1
        if len(values) <= acknowledged:
            raise ProtocolBroken(f"{what} reads {len(values)} values, {acknowledged + 1} were acknowledged before")
        self.acknowledged = max(self.acknowledged, len(values) - 1)

    def _check_prefixes(self) -> None:
        """Of each epoch the log has a beginning of what its owner recorded, without gaps."""
        for epoch, values in self.recorded.items():
            there = [value in self._index for value in values]
            if True in there[there.index(False) :] if False in there else False:
                raise ProtocolBroken(f"the log has a gap in what the owner of epoch {epoch} recorded")


class SimulatedNode:
    """A node: it restores, follows, claims now and then, owns, and begins again when it is fenced."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.keys = world.keys
        self.life = 0
        self._paused_until = 0.0
        self.follower: ShardFollower | None = None

    def start(self) -> None:
        """Begin another life."""
        self.life += 1
        self.run(self._live())

    def kill(self) -> None:
        """End it; another process of the same name starts later."""
        self.life += 1
        self.follower = None
        self.world.after(self.world.random.uniform(1, 60), self.start)

    def pause(self, ticks: float) -> None:
        """Let nothing happen in it for a while, though its requests are under way."""
        self._paused_until = max(self._paused_until, self.world.now + ticks)

    def check(self) -> None:
        """Compare what it has applied."""
        if self.follower is not None:
            assert isinstance(self.follower.target, ValueTarget)
            self.world.check_values(self.follower.target.values, f"follower {self.name}")

    def run(self, process: Process) -> None:
        """Run a process of this life."""
        self._advance(process, self.life, None, None)

    def _advance(self, process: Process, life: int, found: Any, error: Exception | None) -> None:
        if self.life != life:
            return
        if self.world.now < self._paused_until:
            left = self._paused_until - self.world.now
            self.world.after(left, lambda: self._advance(process, life, found, error))
            return
        try:
            request = process.send(found) if error is None else process.throw(error)
        except StopIteration:
            return
        if isinstance(request, Sleep):
            self.world.after(request.ticks, lambda: self._advance(process, life, None, None))
        else:
            self.world.request(request, lambda *answer: self._advance(process, life, *answer))

    def _live(self) -> Process:
        world = self.world
        while True:
            self.follower = None
            follower = yield from self._restore()
            self.follower = follower
            claims_at = world.now + world.random.uniform(2, 50)
            try:
                while world.now < claims_at:
                    yield from self._poll(follower)
                    yield Sleep(world.random.uniform(1, 8))
                self.follower = None
                yield from self._claim(follower)
            except (FollowerBehind, Fenced):
                pass
            except CorruptFile as error:
                if not world.lost or world.lost not in str(error):
                    raise
                world.noticed += 1
            yield Sleep(world.random.uniform(1, 10))

    def _poll(self, follower: ShardFollower) -> Process:
        try:
            yield from follower.poll_steps(8)
        except StoreUnavailable:
            return
        self.check()

    def _restore(self) -> Generator[StoreRequest | Sleep, Any, ShardFollower]:
        """Begin with the checkpoint of the manifest: it must be whole, or the manifest has another by now."""
        self.world.restores += 1
        while True:
            try:
                stored: StoredManifest | None = yield from read_manifest_steps(self.keys)
                if stored is None or not stored.manifest.checkpoint:
                    return self.world.variant.new_follower(ValueTarget(), Position(1, 0), {})
                name = stored.manifest.checkpoint
                loaded = yield from self._load(name)
                if loaded is not None:
                    values = [value for block in loaded["blocks"] for value in block]
                    self.world.check_values(values, f"checkpoint {name}")
                    seals = {int(epoch): at for epoch, at in loaded["seals"].items()}
                    position = parse_checkpoint_name(name).position
                    return self.world.variant.new_follower(ValueTarget(values), position, seals)
                again = yield from read_manifest_steps(self.keys)
                if again is not None and again.manifest.checkpoint == name:
                    raise ProtocolBroken(f"checkpoint {name} of the manifest is not whole")
            except StoreUnavailable:
                yield Sleep(3)

    def _load(self, name: str) -> Generator[StoreRequest, Any, dict[str, Any] | None]:
        found = yield GetObject(self.keys.checkpoint(name))
        if found is None:
            return None
        loaded: dict[str, Any] = json.loads(found.data)
        chunks = yield GetObjects([self.keys.chunk(chunk) for chunk in loaded["chunks"]])
        if None in chunks:
            return None
        return loaded | {"blocks": [json.loads(chunk.data) for chunk in chunks]}

    def _claim(self, follower: ShardFollower) -> Process:
        world = self.world
        nonce = f"{world.random.getrandbits(128):032x}"
        while True:
            try:
                claimed = yield from claim_steps(self.keys, node=self.name, addresses=(), nonce=nonce)
                break
            except StoreUnavailable:
                yield Sleep(2)
        if claimed is None:
            return
        epoch = claimed.manifest.epoch
        while True:
            try:
                yield from follower.seal_steps(epoch, bytes.fromhex(nonce), int(world.now))
                break
            except StoreUnavailable:
                yield Sleep(2)
        assert isinstance(follower.target, ValueTarget)
        world.check_values(follower.target.values, f"the owner of epoch {epoch}")
        owner = SimulatedOwner(self, epoch, bytes.fromhex(nonce), follower)
        yield from owner.serve()


class SimulatedOwner:
    """A node while it owns the shard: it takes values and questions, and makes checkpoints."""

    def __init__(self, node: SimulatedNode, epoch: int, nonce: bytes, follower: ShardFollower) -> None:
        assert isinstance(follower.target, ValueTarget)
        self.world = node.world
        self.node = node
        self.keys = node.keys
        self.epoch = epoch
        self.seals = dict(follower.seals)
        self.wal = self.world.variant.new_wal(epoch, nonce, follower.position.objects)
        self._base = follower.target.values
        self._values: list[int] = []
        """What it recorded: the n-th has sequence n. Some are no values, but make an object for a read."""
        self.world.recorded[epoch] = self._values
        self._is_checkpointing = False
        self._known: dict[bytes, str] = {}
        self._kept: dict[str, list[str]] = {}
        self._is_based = False

    def serve(self) -> Process:
        """Work until it is fenced, or gives up."""
        random = self.world.random
        self._publish()
        until = self.world.now + random.uniform(20, 150)
        while self.wal.failure is None and self.world.now < until:
            yield Sleep(random.uniform(0.5, 6))
            choice = random.random()
            if choice < 0.55:
                for _ in range(random.randint(1, 5)):
                    self._publish()
            elif choice < 0.75:
                self.node.run(self._read())
            elif self.world.variant.has_checkpoints and not self._is_checkpointing:
                self._is_checkpointing = True
                self.node.run(self._checkpoint())
        # Whoever gives up leaves its requests under way, and asks for nothing more.
        self.wal.fail(Fenced("over"))

    def committed_values(self) -> list[int]:
        """The state as far as it is committed."""
        return self._base + self._values[: self.wal.committed]

    def _record(self, done: Waiter) -> None:
        self.world.values += 1
        value = self.world.values
        self._values.append(value)
        self.wal.record(encode_operation(Write(1, 0, _VALUE.pack(value))))
        self.wal.wait(self.wal.recorded, done)
        self._put()

    def _publish(self) -> None:
        value = self.world.values + 1
        self._record(lambda: self.world.acknowledge(value, self.epoch))

    def _put(self) -> None:
        while (pending := self.wal.next_put()) is not None:
            data = pending.encoded(self.epoch, self.wal.nonce, lambda: int(self.world.now))
            self.node.run(self._put_object(pending.position, data))

    def _put_object(self, position: int, data: bytes) -> Process:
        """Put an object as WalWriter does: again and again, and what exists is compared."""
        key = self.keys.wal(self.epoch, position)
        while self.wal.failure is None:
            try:
                yield PutNew(key, data)
                outcome = PutOutcome.COMMITTED
            except KeyExists:
                try:
                    found = yield GetObject(key)
                except StoreUnavailable:
                    continue
                outcome = self.wal.compare(None if found is None else found.data)
            except StoreUnavailable:
                outcome = PutOutcome.AGAIN
            if outcome is PutOutcome.FENCED:
                self.wal.fail(Fenced("another has the position"))
                return
            if outcome is PutOutcome.COMMITTED and self.wal.failure is None:
                for waiter in self.wal.acknowledge(position):
                    waiter()
                self._put()
                return
            yield Sleep(1)

    def _read(self) -> Process:
        """Answer a question with the state, after the barrier."""
        asked, what = self.world.acknowledged, f"the owner of epoch {self.epoch}"
        position = self.world.variant.barrier_position(self.wal)
        if position is None or self.world.random.random() < 0.3:
            if self.wal.failure is None:
                self._record(lambda: self.world.check_read(self.committed_values(), asked, what))
            return
        values = self.committed_values()
        try:
            found = yield GetObject(self.keys.wal(self.epoch, position))
        except StoreUnavailable:
            return
        if self.wal.failure is None and self.world.variant.passes_barrier(self.wal, found):
            self.world.check_read(values, asked, what)

    # Checkpoints.

    def _checkpoint(self) -> Process:
        with contextlib.suppress(StoreUnavailable, Fenced):
            yield from self._make_checkpoint()
        self._is_checkpointing = False

    def _make_checkpoint(self) -> Process:
        """What Checkpointer does, with a block of values for a chunk."""
        world = self.world
        yield from self._begin()
        position, values = Position(self.epoch, self.wal.cut()), self._base + self._values
        blocks = [values[at : at + _BLOCK] for at in range(0, len(values), _BLOCK)]
        upload = f"{world.random.getrandbits(64):016x}"
        chunks = []
        for block in blocks:
            chunks.append((yield from self._upload(json.dumps(block).encode(), upload)))
        self.wal.want(self.wal.recorded)
        self._put()
        while self.wal.committed_objects < position.objects:
            yield Sleep(2)
            if self.wal.failure is not None:
                raise Fenced("over")
        name = str(CheckpointName(position, int(world.now), upload))
        yield from self._put_own(
            self.keys.checkpoint(name), json.dumps({"chunks": chunks, "seals": self.seals}).encode()
        )
        kept = [*self._kept, name][-world.random.randint(1, 3) :]
        nonce = f"{world.random.getrandbits(128):032x}"
        yield from set_checkpoint_steps(self.keys, self.epoch, nonce, name, kept[0])
        world.checkpoints += 1
        needed = {**self._kept, name: chunks}
        self._kept = {each: needed[each] for each in kept}
        self._known = {digest: chunk for digest, chunk in self._known.items() if chunk in chunks}
        yield from self._collect(name, kept)

    def _begin(self) -> Process:
        if self._is_based:
            return
        stored = yield from read_manifest_steps(self.keys)
        if stored is None or stored.manifest.epoch != self.epoch:
            raise Fenced("over")
        name = stored.manifest.checkpoint
        if name:
            loaded = yield from self.node._load(name)
            if loaded is None:
                raise Fenced("over")
            self._kept = {name: loaded["chunks"]}
            self._known = {bytes.fromhex(chunk.split("-")[0]): chunk for chunk in loaded["chunks"]}
        self._is_based = True

    def _upload(self, data: bytes, upload: str) -> Generator[StoreRequest | Sleep, Any, str]:
        digest = digest_of(data)
        if digest not in self._known:
            name = f"{digest.hex()}-{self.world.variant.chunk_upload(self.epoch, upload)}"
            yield from self._put_own(self.keys.chunk(name), data)
            self._known[digest] = name
        return self._known[digest]

    def _put_own(self, key: str, data: bytes) -> Process:
        while True:
            try:
                yield PutNew(key, data)
                return
            except KeyExists:
                return
            except StoreUnavailable:
                yield Sleep(2)

    def _collect(self, current: str, kept: list[str]) -> Process:
        needed = {chunk for chunks in self._kept.values() for chunk in chunks} | set(self._known.values())
        position = parse_checkpoint_name(kept[0]).position
        yield Sleep(self.world.random.uniform(0, 5))
        self.world.deleted += yield from collect_checkpoints_steps(self.keys, current, kept, 100)
        listed = yield from list_chunks_steps(self.keys)
        for steps in (
            collect_chunks_steps(self.keys, self.epoch, listed, needed, 100),
            collect_wal_steps(self.keys, position, self.seals, 100),
        ):
            self.world.deleted += yield from steps


def run_world(seed: int, variant: Variant | None = None, *, has_stranger: bool = False) -> World:
    """Run a world; what is wrong in it says the seed."""
    world = World(seed, variant or Variant(), has_stranger=has_stranger)
    try:
        world.run()
    except (ProtocolBroken, HeadraceError) as error:
        raise ProtocolBroken(f"world {seed}: {error}") from error
    return world
