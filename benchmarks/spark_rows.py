"""The rows that Spark reads, the same ones every time, and what queries over them must come to."""

import functools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

from headrace.bench.measure import check

SIZE, KEYS, BATCH, PARTITIONS = 100, 1000, 1000, 2
ROWS = 10_000_000
SLOW_ROWS = 500_000
"""For subjects that take a Python object for each row: enough to know their rate."""
_UNIT = BATCH * PARTITIONS
_BEGIN_MS = 1_760_000_000_000
_NAMES = [b"key-%04d" % number for number in range(KEYS)]


class Chunk(NamedTuple):
    """Messages that are published together, to one partition."""

    partition: int
    keys: Sequence[bytes]
    values: Sequence[bytes]
    times_ms: Sequence[int]


class Group(NamedTuple):
    """What there is of a key."""

    rows: int
    bytes: int
    last_ms: int


class Truth(NamedTuple):
    """What is known of the first rows."""

    rows: int
    checksum: int
    """The sum of all values' CRC-32."""
    groups: Mapping[bytes, Group]


def rows_asked() -> int:
    """How many rows a run reads and writes, from the environment."""
    return whole(int(os.environ.get("HEADRACE_BENCH_ROWS", ROWS)))


def whole(rows: int) -> int:
    """As many, or a few more, that fill a batch of every partition."""
    return max(-(-rows // _UNIT), 1) * _UNIT


def chunks(rows: int) -> Iterator[Chunk]:
    """The first rows: random values, random keys, a time for each, a millisecond apart; partitions take turns."""
    assert rows % _UNIT == 0
    for number in range(rows // BATCH):
        random = Random(number)
        blob = random.randbytes(SIZE * BATCH)
        begin_ms = _BEGIN_MS + number * BATCH
        yield Chunk(
            number % PARTITIONS,
            random.choices(_NAMES, k=BATCH),
            [blob[at : at + SIZE] for at in range(0, len(blob), SIZE)],
            range(begin_ms, begin_ms + BATCH),
        )


@functools.cache
def truth(rows: int) -> Truth:
    """What is known of the first rows; to find out takes a while, once."""
    checksum, counts, last_ms = 0, Counter[bytes](), dict[bytes, int]()
    for chunk in chunks(rows):
        checksum += sum(map(crc32, chunk.values))
        counts.update(chunk.keys)
        last_ms.update(zip(chunk.keys, chunk.times_ms, strict=True))
    return Truth(rows, checksum, {key: Group(count, count * SIZE, last_ms[key]) for key, count in counts.items()})


def check_all(seen: int, checksum: int | None, known: Truth) -> None:
    """Fail unless these are all the rows, with the values they had."""
    check(seen == known.rows, f"{seen} rows came back of {known.rows}")
    check(checksum == known.checksum, "there are all rows, but with other values")


def check_groups(found: Sequence[Any], known: Truth) -> None:
    """Fail unless rows of key, count, bytes and milliseconds say what is known of each key."""
    check(len(found) == len(known.groups), f"{len(found)} keys came back of {len(known.groups)}")
    for key, *group in found:
        check(Group(*group) == known.groups.get(bytes(key)), f"{bytes(key)!r} has {group}")


def params(rows: int) -> dict[str, Any]:
    """What is told of them."""
    return {"size": SIZE, "keys": KEYS, "partitions": PARTITIONS, "batch": BATCH, "rows": rows}
