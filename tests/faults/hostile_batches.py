"""Batches that are well formed, and say what no good producer would: every column with every type and every extreme."""

import struct
from typing import Any

import msgspec
from crc32c import crc32c
from hypothesis import strategies as st

from headrace.broker.dead_letters import PREFIX
from headrace.model.codec import Codec, compress
from headrace.model.leasing import OWNER_HEADER, SUBSCRIPTION_HEADER
from headrace.model.limits import TIMESTAMP_US_MAX, TIMESTAMP_US_MIN
from headrace.testing.workbench import START_US

EXTREMES = (0, 1, -1, 127, 128, 1 << 31, 1 << 32, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
HEADER_NAMES = (
    *("", "name", OWNER_HEADER, SUBSCRIPTION_HEADER),
    *(PREFIX + name for name in ("topic", "subscription", "partition", "time", "deliveries", "reason")),
)
NIL = b"\xc0"

binary = st.binary(max_size=6) | st.sampled_from(
    [b"", bytes(255), bytes(256), bytes(70_000), b"9" * 5000, b"-1", b"7", b"orders", b"keys"]
)
numbers = st.sampled_from(EXTREMES) | st.integers(-(1 << 63), (1 << 64) - 1)
times = st.sampled_from(
    [TIMESTAMP_US_MIN, TIMESTAMP_US_MAX, 0, START_US - 1, START_US, START_US + 1, START_US + 30_000_000]
)
priorities = st.sampled_from([0, 1, -1, 32_767, 32_768, -32_769, (1 << 31) - 1, -(1 << 31)])
headers = st.dictionaries(st.sampled_from(HEADER_NAMES), binary, max_size=3)
junk: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=3) | binary | times.map(float),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2) | st.integers(0, 9), inner),
    max_leaves=4,
)
ENTRIES: dict[str, st.SearchStrategy[Any]] = {
    "values": binary | st.none(),
    "keys": binary | st.none(),
    "timestamps": times,
    "headers": headers | st.none(),
    "dues": times | st.none(),
    "priorities": priorities | st.none(),
    "expires": times | st.none(),
}
SPOILED: dict[str, st.SearchStrategy[Any]] = {
    name: (numbers | junk if name in ("timestamps", "dues", "priorities", "expires") else junk) for name in ENTRIES
}
OTHERS = st.none() | junk | st.lists(st.integers(-1, 50), max_size=40) | st.just([[0, 99, 0, 0]])


def packed_array(entries: list[bytes], width: int) -> bytes:
    """An array, its length written in so many bytes, which need not be the fewest."""
    count = len(entries)
    if width == 0 and count < 16:
        head = bytes([0x90 | count])
    else:
        head = (
            b"\xdc" + struct.pack(">H", count) if width < 4 and count < 1 << 16 else b"\xdd" + struct.pack(">I", count)
        )
    return head + b"".join(entries)


@st.composite
def column(draw: st.DrawFn, name: str, count: int, spoil: bool) -> bytes:
    """A column of the right length with good entries, or with one mistake, or something else altogether."""
    length = count if not spoil or draw(st.booleans()) else draw(st.sampled_from([0, count - 1, count + 1]))
    if draw(st.booleans()):
        entries = [draw(ENTRIES[name])] * length
    else:
        entries = draw(st.lists(ENTRIES[name], min_size=length, max_size=length))
    if spoil and draw(st.integers(0, 9)) == 0:
        return msgspec.msgpack.encode(draw(junk))
    if spoil and entries:
        entries = [*entries]
        entries[draw(st.integers(0, length - 1))] = draw(SPOILED[name])
    return packed_array([msgspec.msgpack.encode(entry) for entry in entries], draw(st.sampled_from([0, 2, 4])))


def times_of(body: bytes) -> tuple[int, int]:
    """The times that a header should tell, as far as there are any."""
    try:
        given = msgspec.msgpack.decode(body)[2]
        return min(given), max(given)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, RecursionError):
        return START_US, START_US


@st.composite
def hostile_batch(draw: st.DrawFn) -> bytes:
    """A batch with right checksums, mostly with one mistake, sometimes with none."""
    count = draw(st.sampled_from([1, 2, 3, 33, 40]))
    names = list(ENTRIES)
    spoiled = draw(st.sampled_from([*[None] * 5, *names, "places", "origins", "more", "header", "body", "codec"]))
    present = {name for name in names if name in ("values", spoiled) or draw(st.booleans())}
    columns = [draw(column(name, count, name == spoiled)) if name in present else NIL for name in names]
    for name in ("places", "origins"):
        columns.append(msgspec.msgpack.encode(draw(OTHERS)) if name == spoiled else NIL)
    if spoiled == "more":
        columns.append(msgspec.msgpack.encode(draw(junk)))
    columns = columns[: draw(st.sampled_from([*range(1, 10), 10]))] if spoiled is None else columns
    body = packed_array(columns, 0)
    if spoiled == "body":
        body = draw(
            st.sampled_from([b"", body[:-1], body + NIL, body[:-1] + b"\xc1", b"\x91" * 100_000, b"\xdd" + body])
        )
    bounds = draw(st.tuples(numbers, numbers)) if spoiled == "header" else times_of(body)
    bounds = tuple(max(min(bound, (1 << 63) - 1), -(1 << 63)) if type(bound) is int else 0 for bound in bounds)
    codec = draw(st.sampled_from(list(Codec)))
    raw, body = body, body if codec is Codec.NONE else compress(codec, body)
    if spoiled == "codec":
        codec, body = draw(st.sampled_from(list(Codec))), draw(spoiled_bodies(raw))
    flags = draw(st.sampled_from([0, 0, 1, 4, 65_535])) if spoiled == "header" else 0
    span = draw(st.sampled_from([count, count, 0, count + 1])) if spoiled == "header" else count
    covered = struct.pack("<IBBHIIIqqQII", 96 + len(body), 2, codec, flags, count, span, 0, *bounds, 0, 0, 0) + body
    return struct.pack("<4sIQqQIII", b"\xa7HRB", 0, 0, 0, 0, 0, 0, crc32c(covered)) + covered


@st.composite
def spoiled_bodies(draw: st.DrawFn, raw: bytes) -> bytes:
    """A compressed body that lies about its length, ends early, or goes on."""
    body = compress(draw(st.sampled_from([Codec.LZ4, Codec.ZSTD])), raw)
    length = draw(st.sampled_from([0, len(raw) - 1, len(raw), len(raw) + 1, 32 << 20, (32 << 20) + 1, (1 << 32) - 1]))
    cut = draw(st.sampled_from([0, 3, 4, len(body) - 1, len(body)]))
    return (max(length, 0).to_bytes(4, "little") + body[4:])[:cut] + draw(st.sampled_from([b"", b"\0", body[4:]]))
