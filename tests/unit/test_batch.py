"""The batch: what goes in comes out, and what is not a batch is refused."""

import contextlib

import msgspec
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.batch import (
    FLAG_LOST,
    HEADER_BYTES,
    Batch,
    Columns,
    Producer,
    encode,
    gap,
    parse,
    received,
)
from headrace.model.codec import Codec
from headrace.model.errors import (
    BatchTooLarge,
    HeadraceError,
    InvalidArgument,
    InvalidBatch,
    MessageTooLarge,
    UnsupportedFormat,
)
from headrace.model.limits import BATCH_COUNT_MAX, MESSAGE_BYTES_MAX

TIMES = st.integers(-(2**62), 2**62)
MAYBE_BYTES = st.none() | st.binary(max_size=50)
HEADERS = st.none() | st.dictionaries(st.text(max_size=8), st.binary(max_size=8), max_size=3)


@st.composite
def columns(draw: st.DrawFn) -> Columns:
    count = draw(st.integers(1, 20))

    def column(entries: st.SearchStrategy) -> list | None:
        return draw(st.none() | st.lists(entries, min_size=count, max_size=count))

    return Columns(
        draw(st.lists(MAYBE_BYTES, min_size=count, max_size=count)),
        column(MAYBE_BYTES),
        column(TIMES),
        column(HEADERS),
        column(st.none() | TIMES),
        column(st.none() | st.integers(0, 255)),
        column(st.none() | TIMES),
    )


def stored(batch: Batch, base_offset: int = 7, append_time: int = 8, log_id: int = 9) -> memoryview:
    batch.place(base_offset, append_time, log_id)
    return memoryview(bytes(batch.data))


@given(columns(), st.sampled_from(Codec), st.builds(Producer, *[st.integers(0, 2**32 - 1)] * 3))
def test_everything_comes_back(given_columns: Columns, codec: Codec, producer: Producer) -> None:
    batch = parse(stored(encode(given_columns, 1234, codec=codec, producer=producer)))
    batch.verify()
    assert batch.columns() == given_columns
    assert (batch.base_offset, batch.append_time, batch.log_id) == (7, 8, 9)
    assert (batch.count, batch.span, batch.producer) == (len(given_columns.values), len(given_columns.values), producer)
    times = given_columns.timestamps or [1234]
    assert (batch.time_min, batch.time_max) == (min(times), max(times))
    messages = list(batch.messages())
    assert [message.offset for message in messages] == list(range(7, 7 + batch.count))
    assert [message.value for message in messages] == given_columns.values
    assert [message.timestamp for message in messages] == (given_columns.timestamps or [1234] * batch.count)


@given(columns(), st.data())
def test_every_flipped_bit_is_found(given_columns: Columns, data: st.DataObject) -> None:
    good = stored(encode(given_columns, 1))
    bad = bytearray(good)
    bit = data.draw(st.integers(0, len(bad) * 8 - 1))
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises(InvalidBatch):
        parse(memoryview(bad)).verify()


@given(columns(), st.data())
def test_every_torn_batch_is_found(given_columns: Columns, data: st.DataObject) -> None:
    good = stored(encode(given_columns, 1))
    cut = data.draw(st.integers(0, len(good) - 1))
    with pytest.raises(InvalidBatch):
        parse(good[:cut]).verify()
    torn = memoryview(bytes(good[:cut]) + bytes(len(good) - cut))
    if torn != good:
        with pytest.raises(InvalidBatch):
            parse(torn).verify()


@given(st.binary(max_size=300))
def test_random_bytes_are_no_batch(noise: bytes) -> None:
    with pytest.raises(InvalidBatch):
        parse(memoryview(noise)).verify()
    with pytest.raises(InvalidBatch):
        received(bytearray(noise))


def with_body(body: bytes, count: int, codec: int = 0) -> Batch:
    """A batch whose checksums hold and whose body is anything."""
    batch = gap(count, 0, 0, body)
    data = bytearray(batch.data)
    data[45] = codec
    data[48:52] = count.to_bytes(4, "little")
    data[36:40] = crc32c(memoryview(data)[40:]).to_bytes(4, "little")
    return received(data)


@given(st.binary(max_size=100), st.sampled_from([0, 1, 2, 3, 77]), st.integers(1, 5))
def test_hostile_bodies_are_refused(body: bytes, codec: int, count: int) -> None:
    with contextlib.suppress(InvalidBatch):
        batch = with_body(body, count, codec)
        assert len(batch.columns().values) == count


@pytest.mark.parametrize(
    "body",
    [
        [[b"a"]],
        [[b"a", b"b", b"c"]],
        [[b"a", b"b"], [b"k"]],
        [["text", "text"]],
        [[b"a", b"b"], None, None, None, None, None, None, [0, 2]],
        [[b"a", b"b"], None, None, None, None, None, None, [1, 0]],
        [[b"a", b"b"], None, None, None, None, None, None, [-1, 0]],
    ],
)
def test_columns_that_do_not_fit_are_refused(body: list) -> None:
    with pytest.raises(InvalidBatch):
        with_body(msgspec.msgpack.encode(body), 2).columns()


def test_columns_of_a_later_version_are_passed_over() -> None:
    body = msgspec.msgpack.encode([[b"a"], None, None, None, None, None, None, None, None, ["new"]])
    assert with_body(body, 1).columns().values == [b"a"]


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_a_bomb_is_not_unpacked(codec: Codec) -> None:
    batch = encode(Columns([bytes(1 << 20)]), 1, codec=codec)
    assert len(batch.data) < 10_000
    for claimed in (0, 100, 2**32 - 1):
        body = claimed.to_bytes(4, "little") + bytes(batch.data[HEADER_BYTES + 4 :])
        with pytest.raises(InvalidBatch):
            with_body(body, 1, codec).columns()


def test_what_does_not_compress_is_stored_as_it_is() -> None:
    batch = encode(Columns([bytes(range(256))]), 1, codec=Codec.ZSTD)
    assert batch.codec == Codec.NONE
    assert list(batch.columns().values) == [bytes(range(256))]


def test_a_newer_version_is_not_taken_for_damage() -> None:
    batch = encode(Columns([b"a"]), 1)
    data = bytearray(batch.data)
    data[44] = 2
    with pytest.raises(UnsupportedFormat):
        received(data)


def test_limits() -> None:
    for count in (0, BATCH_COUNT_MAX + 1):
        with pytest.raises(BatchTooLarge):
            encode(Columns([b""] * count), 1)
    with pytest.raises(MessageTooLarge):
        encode(Columns([bytes(MESSAGE_BYTES_MAX + 1)]), 1)
    with pytest.raises(MessageTooLarge):
        encode(Columns([b""], headers=[{"h": bytes(MESSAGE_BYTES_MAX)}]), 1)
    with pytest.raises(BatchTooLarge):
        encode(Columns([bytes(MESSAGE_BYTES_MAX)] * 3), 1)
    encode(Columns([bytes(MESSAGE_BYTES_MAX)]), 1)
    with pytest.raises(InvalidArgument):
        encode(Columns([object()]), 1)  # type: ignore[list-item]


def test_a_producer_may_not_send_gaps() -> None:
    with pytest.raises(InvalidBatch):
        received(bytearray(gap(5, FLAG_LOST, 0).data))


def test_a_producer_may_not_send_what_nobody_can_decompress() -> None:
    with pytest.raises(InvalidBatch, match="codec 7"):
        with_body(b"body", 1, codec=7)


def test_every_error_has_a_code_of_its_own_and_a_text() -> None:
    def tree(kind: type[HeadraceError]) -> list[type[HeadraceError]]:
        return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]

    kinds = tree(HeadraceError)
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all(kind.__doc__ and kind.__doc__.endswith(".") for kind in kinds)
    assert str(InvalidBatch()) == "The bytes are not a batch: a checksum, a length or a field is wrong."
