"""Tells the end of a log from a hole in it: an object that was committed, and that somebody deleted."""

from headrace.model.errors import UnsupportedFormat
from headrace.storage.replicated.keys import Position, ShardKeys
from headrace.storage.replicated.operations import SEAL, DamagedObject, decode_header
from headrace.storage.replicated.steps import GetObject, GetObjects, ListNames, Steps
from headrace.storage.replicated.wal import IN_FLIGHT_MAX


def proof_steps(keys: ShardKeys, at: Position) -> Steps[str]:
    """The key of an object that proves that the one at a position, which was absent, had been there; else empty.

    An owner puts an object only when the one IN_FLIGHT_MAX before it is committed: up to three may follow one that was
    never put. Whoever seals an epoch, or puts anything in a later one, has read all that is before. What garbage
    collection has deleted has such proofs, too: so the caller reads the manifest afterwards.
    """
    names = yield ListNames(keys.wal_prefix, keys.wal(*at), IN_FLIGHT_MAX)
    proof, near = "", []
    for key in names:
        epoch, objects = _position_of(keys, key)
        if epoch > at.epoch or objects >= at.objects + IN_FLIGHT_MAX:
            proof = key
            break
        if epoch == at.epoch:
            near.append(key)
    if not proof and near:
        found = yield GetObjects(near)
        proof = next((key for key, one in zip(near, found, strict=False) if one is not None and _is_seal(one.data)), "")
    if not proof:
        return ""
    again = yield GetObject(keys.wal(*at))  # the owner, or whoever sealed the epoch, may just have been faster
    return "" if again is not None else proof


def _position_of(keys: ShardKeys, key: str) -> Position:
    """The position in a key; one before all others if the key is not one of Headrace."""
    try:
        return Position(*keys.position(key))
    except ValueError:
        return Position(0, 0)


def _is_seal(data: bytes) -> bool:
    try:
        return decode_header(data).kind == SEAL
    except (DamagedObject, UnsupportedFormat):
        return False
