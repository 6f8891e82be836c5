"""The batch: what goes in comes out, and what is not a batch is refused."""

import contextlib
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

import msgspec
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.batch import (
    FLAG_LOST,
    HEADER_BYTES,
    VERSION,
    Batch,
    Columns,
    Producer,
    encode,
    gap,
    leading_batches,
    parse,
    received,
)
from headrace.model.codec import Codec, compress
from headrace.model.errors import (
    BatchTooLarge,
    HeadraceError,
    InvalidArgument,
    InvalidBatch,
    MessageTooLarge,
    UnsupportedFormat,
)
from headrace.model.limits import (
    BATCH_COUNT_MAX,
    BODY_EXPANSION_MAX,
    MESSAGE_BYTES_MAX,
    TIMESTAMP_US_MAX,
    TIMESTAMP_US_MIN,
)
from headrace.model.packed_column import column_end, uniform_column_end

TIMES = st.integers(TIMESTAMP_US_MIN, TIMESTAMP_US_MAX)
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


def with_body(body: bytes, count: int, codec: int = 0, times: tuple[int, int] = (0, 0)) -> Batch:
    """A batch as a producer sends it, whose checksums hold and whose body is anything."""
    batch = gap(count, 0, 0, body)
    data = bytearray(batch.data)
    data[49] = codec
    data[52:56] = count.to_bytes(4, "little")
    data[64:80] = times[0].to_bytes(8, "little", signed=True) + times[1].to_bytes(8, "little", signed=True)
    data[40:44] = crc32c(memoryview(data)[44:]).to_bytes(4, "little")
    return received(data)


def in_log(body: bytes, count: int) -> Batch:
    """A batch that stands in a log, stored by who did not look into it."""
    batch = gap(count, 0, 0, body)
    batch.count = count
    return batch


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
    packed = msgspec.msgpack.encode(body)
    for look in (Batch.columns, Batch.outline, lambda _: with_body(packed, 2)):
        with pytest.raises(InvalidBatch):
            look(in_log(packed, 2))


def test_columns_of_a_later_version_are_passed_over_when_stored_and_refused_when_published() -> None:
    body = msgspec.msgpack.encode([[b"a"], None, None, None, None, None, None, None, None, ["new"]])
    assert in_log(body, 1).columns().values == [b"a"]
    with pytest.raises(InvalidBatch):
        with_body(body, 1)


COUNT = 40
"""More messages than are decoded when a batch is received."""
GOOD: dict[str, list] = {
    "values": [b"value"] * COUNT,
    "keys": [b"key"] * COUNT,
    "timestamps": [5] * COUNT,
    "headers": [{"name": b"text"}] * COUNT,
    "dues": [7] * COUNT,
    "priorities": [1] * COUNT,
    "expires": [9] * COUNT,
}
FIELDS = (*GOOD, "places", "origins")
WRONG = {
    "values": [1, "text", True, 1.5, [b"a"], {}, msgspec.msgpack.Ext(1, b"a")],
    "keys": [1, "text", True, 1.5, [b"a"], {}, msgspec.msgpack.Ext(1, b"a")],
    "timestamps": [None, TIMESTAMP_US_MIN - 1, TIMESTAMP_US_MAX + 1, 2**63, 2**64 - 1, -(2**63), 1.0, True, b"", "1"],
    "headers": [
        *(1, b"", [], {b"name": b"text"}, {"name": "text"}, {1: b"text"}, {"name": [b"text"]}),
        *([["name"]], [["name"], []], [["name"], [b"1", b"2"]], [[b"name"], [b"1"]], [["name"], ["1"]], ["name", b"1"]),
    ],
    "dues": [TIMESTAMP_US_MIN - 1, TIMESTAMP_US_MAX + 1, 2**63, 2**64 - 1, -(2**63), 1.0, True, b"", "1", [1]],
    "priorities": [-(2**31) - 1, 2**31, 2**63, 2**64 - 1, 1.0, True, b"", "1"],
    "expires": [TIMESTAMP_US_MIN - 1, TIMESTAMP_US_MAX + 1, 2**63, 2**64 - 1, -(2**63), 1.0, True, b"", "1"],
}


def published(columns: dict[str, object], count: int = COUNT) -> Batch:
    """A batch of these columns, as a producer sends it; its header tells the times of the messages."""
    times = columns.get("timestamps")
    whole = [time for time in (times if isinstance(times, list) else ()) if type(time) is int and abs(time) < 2**63]
    body = msgspec.msgpack.encode([columns.get(name) for name in FIELDS])
    return with_body(body, count, times=(min(whole, default=0), max(whole, default=0)))


@pytest.mark.parametrize(("field", "entry"), [(field, entry) for field, entries in WRONG.items() for entry in entries])
@pytest.mark.parametrize("at", [0, 17, COUNT - 1])
def test_an_entry_of_a_wrong_kind_or_out_of_range_is_refused(field: str, entry: object, at: int) -> None:
    for others in (GOOD, {"values": GOOD["values"]}):
        column = list(GOOD[field])
        column[at] = entry
        with pytest.raises(InvalidBatch):
            published({**others, field: column})
        small = {name: [given[0]] for name, given in others.items()}
        with pytest.raises(InvalidBatch):
            published({**small, field: [entry]}, 1)


@pytest.mark.parametrize("field", GOOD)
def test_a_column_of_another_length_or_of_no_length_is_refused(field: str) -> None:
    for column in ([], GOOD[field][1:], [*GOOD[field], *GOOD[field][:1]], {}, 7, b"", "text", True):
        with pytest.raises(InvalidBatch):
            published({**GOOD, field: column})


def test_what_is_the_broker_s_to_say_is_refused() -> None:
    for field, column in (("places", list(range(COUNT))), ("origins", []), ("origins", [[0, 99, 0, 0]])):
        with pytest.raises(InvalidBatch):
            published({**GOOD, field: column})
        with pytest.raises(InvalidBatch):
            published({"values": [b"a"], field: column[:1]}, 1)


@pytest.mark.parametrize("count", [1, COUNT])
def test_a_header_that_tells_other_times_is_refused(count: int) -> None:
    values, times = [b"value"] * count, [*range(5, 4 + count), 99]
    with_time = msgspec.msgpack.encode([values, None, times])
    assert with_body(with_time, count, times=(min(times), 99)).count == count
    for wrong in ((min(times) - 1, 99), (min(times), 100), (0, 0), (-(2**63), 2**63 - 1)):
        with pytest.raises(InvalidBatch):
            with_body(with_time, count, times=wrong)
    without = msgspec.msgpack.encode([values])
    assert with_body(without, count, times=(5, 5)).count == count
    for wrong in ((5, 6), (6, 5), (TIMESTAMP_US_MIN - 1,) * 2, (TIMESTAMP_US_MAX + 1,) * 2):
        with pytest.raises(InvalidBatch):
            with_body(without, count, times=wrong)


@pytest.mark.parametrize("codec", list(Codec))
def test_bytes_behind_the_columns_are_refused(codec: Codec) -> None:
    for count in (1, COUNT):
        good = bytes(encode(Columns([b"value"] * count), 0).data[HEADER_BYTES:])
        for more in (b"\xc0", b"\0", good):
            body = good + more if codec is Codec.NONE else compress(codec, good + more)
            with pytest.raises(InvalidBatch):
                with_body(body, count, codec)
            if codec is not Codec.NONE:
                with pytest.raises(InvalidBatch):
                    with_body(compress(codec, good) + more, count, codec)


@given(columns(), st.sampled_from(Codec), st.integers(1, 40))
def test_what_a_producer_makes_is_received(given_columns: Columns, codec: Codec, times: int) -> None:
    def repeated(column: Sequence | None) -> list | None:
        return None if column is None else list(column) * times

    many = Columns(*(repeated(getattr(given_columns, name)) for name in FIELDS))
    batch = received(encode(many, 1234, codec=codec).data)  # type: ignore[arg-type]
    assert batch.columns() == many
    batch.decoded = None
    outline = batch.outline()
    for name in ("timestamps", "headers", "dues", "priorities", "expires", "places", "origins"):
        assert getattr(outline, name) == getattr(many, name)


@given(st.integers(2, 70_000), st.integers(0, 70_000), st.data())
def test_values_of_one_length_are_found_without_decoding(count: int, length: int, data: st.DataObject) -> None:
    count = min(count, BATCH_COUNT_MAX, max((1 << 20) // (length + 1), 2))
    values = [bytes(length)] * count
    body = msgspec.msgpack.encode([values, 7])
    assert uniform_column_end(body, 1, count) == len(body) - 1
    at = data.draw(st.integers(0, count - 1))
    other = data.draw(st.sampled_from([None, 1, "text", b"x" * (length + 1), [b""]]))
    assert not uniform_column_end(msgspec.msgpack.encode([[*values[:at], other, *values[at + 1 :]]]), 1, count)
    assert not uniform_column_end(body[:-2], 1, count)
    assert not uniform_column_end(body, 1, count + 1)


@given(st.lists(st.none() | st.integers(0, 70_000).map(bytes), min_size=1, max_size=8), st.data())
def test_large_values_are_found_without_decoding(values: list[bytes | None], data: st.DataObject) -> None:
    body = msgspec.msgpack.encode([values, bytes(40_000)])
    end = len(msgspec.msgpack.encode([values]))
    assert column_end(body, 1, len(values)) == end
    at = data.draw(st.integers(0, len(values) - 1))
    for other in (1, "text", [b""], {}, True):
        spoiled = [[*values[:at], other, *values[at + 1 :]], bytes(40_000)]
        assert not column_end(msgspec.msgpack.encode(spoiled), 1, len(values))
    for cut in (data.draw(st.integers(0, end - 1)), 0, 1, 2, 3):
        assert not column_end(body[: min(cut, end - 1)], 1, len(values))
    assert not column_end(body, 1, len(values) + 1)


def test_a_frame_with_a_window_larger_than_a_batch_is_refused() -> None:
    raw = bytes(encode(Columns([bytes(1000)]), 1).data[HEADER_BYTES:])
    # A frame without a content size whose window has 2^27 bytes, and a raw block that is the last.
    frame = b"\x28\xb5\x2f\xfd" + bytes([0x00, 17 << 3]) + (len(raw) << 3 | 1).to_bytes(3, "little") + raw
    with pytest.raises(InvalidBatch, match="does not decompress"):
        with_body(len(raw).to_bytes(4, "little") + frame, 1, Codec.ZSTD)
    small = b"\x28\xb5\x2f\xfd" + bytes([0x00, 10 << 3]) + frame[6:]
    assert with_body(len(raw).to_bytes(4, "little") + small, 1, Codec.ZSTD, (0, 0)).count == 1


def test_what_expands_too_far_is_refused_and_not_made() -> None:
    raw = bytes(encode(Columns([bytes(10 << 20)]), 0).data[HEADER_BYTES:])
    packed = compress(Codec.ZSTD, raw)
    assert len(packed) * BODY_EXPANSION_MAX < len(raw)
    with pytest.raises(InvalidBatch, match="times as many"):
        with_body(packed, 1, Codec.ZSTD)
    made = encode(Columns([bytes(10 << 20)]), 0, codec=Codec.ZSTD)
    assert Codec(made.codec) is Codec.LZ4
    assert made.length < 50_000
    assert received(made.data).columns().values == [bytes(10 << 20)]  # type: ignore[arg-type]


@pytest.mark.parametrize("time_us", [TIMESTAMP_US_MIN - 1, TIMESTAMP_US_MAX + 1, 2**63, 2**70])
def test_a_batch_with_a_time_out_of_range_is_not_made(time_us: int) -> None:
    with pytest.raises(InvalidArgument):
        encode(Columns([b"a"], timestamps=[time_us]), 1)
    with pytest.raises(InvalidArgument):
        encode(Columns([b"a"]), time_us)


def test_python_has_a_datetime_for_every_time_in_every_zone() -> None:
    for time_us in (TIMESTAMP_US_MIN, TIMESTAMP_US_MAX):
        for hours in (-14, 0, 14):
            moment = datetime.fromtimestamp(time_us // 10**6, timezone(timedelta(hours=hours)))
            assert 1 <= moment.year <= 9999
        assert 1 <= datetime.fromtimestamp(time_us // 10**6).year <= 9999  # as Spark does


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
    data[48] = VERSION + 1
    with pytest.raises(UnsupportedFormat):
        received(data)


@pytest.mark.parametrize(("field", "at"), [("epoch", 36), ("key_id", 60)])
def test_reserved_fields_are_zero(field: str, at: int) -> None:
    batch = encode(Columns([b"a"]), 1)
    assert getattr(batch, field) == 0
    data = bytearray(batch.data)
    data[at : at + 4] = (7).to_bytes(4, "little")
    data[40:44] = crc32c(memoryview(data)[44:]).to_bytes(4, "little")
    with pytest.raises(UnsupportedFormat, match=f"{field} 7"):
        received(bytearray(data))
    data[4:8] = crc32c(memoryview(data)[8:HEADER_BYTES]).to_bytes(4, "little")
    with pytest.raises(UnsupportedFormat, match=f"{field} 7"):
        parse(memoryview(data))


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

    kinds = [kind for kind in tree(HeadraceError) if kind.__module__.startswith("headrace.")]  # not those of tests
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all(kind.__doc__ and kind.__doc__.endswith(".") for kind in kinds)
    assert str(InvalidBatch()) == "The bytes are not a batch: a checksum, a length or a field is wrong."


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(0, 60))
def test_batches_at_the_front_have_as_many_messages_as_wanted(counts: list[int], messages_max: int) -> None:
    batches, offset = [], 7
    for count in counts:
        batch = encode(Columns([b"x"] * count), 0) if count else gap(5, FLAG_LOST, 0)
        batch.place(offset, 0, 0)
        offset += batch.span
        batches.append(batch)
    size_bytes, messages, next_offset = leading_batches(
        memoryview(b"".join(bytes(one.data) for one in batches)), messages_max
    )
    taken = 1
    while taken < len(counts) and sum(counts[: taken + 1]) <= messages_max:
        taken += 1
    assert messages == sum(counts[:taken])
    assert size_bytes == sum(one.length for one in batches[:taken])
    assert next_offset == batches[taken - 1].next_offset
