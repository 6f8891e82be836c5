"""The parts of the client that do no I/O."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.client.connection.addresses import parse_address
from headrace.client.connection.backoff import Backoff
from headrace.client.consumer.partition_reader import Delivered, PartitionReader
from headrace.client.producer.batch_split import GivenMessages, portions
from headrace.client.producer.partitioning import partition_places
from headrace.client.producer.pending_batch import OutgoingMessage, PendingBatch, checked_key
from headrace.client.producer.serializing import CannotSerialize, deserializer_of, serialized, serializer_of, to_bytes
from headrace.client.producer.topic_metadata import codec_of, durability_of
from headrace.client.results import Receipt, ReceivedBatch, merged, receipt_at
from headrace.client.times import OffsetSpec, microseconds, spot_at, spot_in_time
from headrace.model.batch import NO_PRODUCER, Batch, Columns, RawColumns, encode, encode_raw, received
from headrace.model.codec import Codec
from headrace.model.errors import CorruptBatch, InvalidArgument, MessageTooLarge
from headrace.model.headers import checked_headers
from headrace.model.limits import TIMESTAMP_US_MAX, TIMESTAMP_US_MIN
from headrace.model.partitioning import by_key

ROOT = Path(__file__).parent.parent.parent


# The two faces.


def test_the_sync_client_is_what_is_made_from_the_async_one() -> None:
    check = [sys.executable, "scripts/unasync.py", "--check"]
    ran = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}\nrun scripts/unasync.py"


def test_importing_headrace_imports_neither_asyncio_nor_the_client() -> None:
    program = "import sys, headrace; print([name for name in sys.modules if name.split('.')[-1] in sys.argv[1:]])"
    found = subprocess.run(
        [sys.executable, "-c", program, "asyncio", "client", "server"], capture_output=True, check=True
    )
    assert found.stdout.strip() == b"[]"


def test_everything_that_is_offered_is_there() -> None:
    assert [name for name in headrace.__all__ if not hasattr(headrace, name)] == []
    assert set(headrace.__all__) <= set(dir(headrace))
    with pytest.raises(AttributeError, match="nothing_of_the_sort"):
        _ = headrace.nothing_of_the_sort


def test_both_faces_have_the_same_words() -> None:
    for name in ("Bus", "Producer", "Subscription", "Transaction", "Sent", "SentMany"):
        mine = {word for word in dir(getattr(headrace, name)) if not word.startswith("_")}
        theirs = {word for word in dir(getattr(headrace, f"Async{name}")) if not word.startswith("_")}
        assert mine == theirs


# Addresses and times.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("headrace://example.org", "headrace://example.org:7390"),
        ("headrace://example.org:1/", "headrace://example.org:1"),
        ("headrace://[::1]:7391", "headrace://[::1]:7391"),
        ("http://example.org", "http://example.org:7391"),
        ("http://[::1]:80/", "http://[::1]:80"),
        ("http://example.org:80/a/b~c%20d/?tenant=acme", "http://example.org:80/a/b~c%20d?tenant=acme"),
        ("headrace+unix:///run/h.sock", "headrace+unix:///run/h.sock"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert str(parse_address(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        "localhost:7390",
        "ftp://x",
        "headrace://",
        "headrace://x:port",
        "headrace://x/y",
        "http://",
        "http://x/a b",
        "http://x/a//b",
        "headrace+unix://x",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidArgument, match="headrace://127"):
        parse_address(text)


def test_an_address_has_no_password_and_the_error_does_not_show_it() -> None:
    with pytest.raises(InvalidArgument, match="HEADRACE_TOKEN") as told:
        parse_address("http://user:password@x")
    assert "password@" not in str(told.value)


@given(st.datetimes(min_value=datetime(1700, 1, 1), max_value=datetime(2500, 1, 1)), st.integers(-14, 14))
def test_microseconds_are_exact(moment: datetime, hours: int) -> None:
    aware = moment.replace(tzinfo=timezone(timedelta(hours=hours)))
    assert datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds(aware)) == aware


def test_spots() -> None:
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    assert spot_at("earliest") == spot_in_time("earliest") == OffsetSpec("earliest")
    assert spot_at(5) == OffsetSpec("offset", 5)
    assert spot_in_time(5) == OffsetSpec("time", 5)
    assert spot_at(noon) == spot_in_time(noon) == OffsetSpec("time", 1893499200000000)
    for wrong in (-1, 1.5, "newest", True, datetime(2030, 1, 1)):
        with pytest.raises(InvalidArgument):
            spot_at(wrong)  # type: ignore[arg-type]


def test_waits_grow_up_to_a_bound() -> None:
    backoff = Backoff(1.0, 5.0)
    for bound in (1, 2, 4, 5, 5):
        assert bound / 2 <= backoff.next_s() <= bound
    backoff.reset()
    assert backoff.next_s() <= 1


# Messages on their way out.


def test_the_partition_of_a_key_is_the_same_for_ever() -> None:
    assert [by_key(key, 16) for key in (b"", b"a", b"customer-17", bytes(100))] == [0, 0, 11, 6]


def test_keys_are_divided() -> None:
    assert partition_places([b"a", None, b"b", b"a"], 2, lambda key, _: key[0] % 2, 0) == {1: [0, 3], 0: [1, 2]}


def test_serializers() -> None:
    assert serialized(serializer_of("json"), {"a": [1, None]}) == b'{"a":[1,null]}'
    assert serialized(serializer_of("str"), "ä") == "ä".encode()
    assert serialized(to_bytes, memoryview(b"x")) == b"x"
    assert serialized(lambda _: bytearray(b"x"), 1) == b"x"  # type: ignore[return-value, arg-type]
    assert deserializer_of("bytes") is None
    for name, wrong in (("json", object()), ("str", b"x"), ("bytes", "x")):
        with pytest.raises(InvalidArgument):
            serialized(serializer_of(name), wrong)
    with pytest.raises(CannotSerialize, match="KeyError"):
        serialized(lambda value: value["missing"], {})
    for choose in (serializer_of, deserializer_of):
        with pytest.raises(InvalidArgument, match="pickle"):
            choose("pickle")


def test_checked_parts() -> None:
    assert checked_key("ä") == "ä".encode()
    assert checked_key(bytearray(b"x")) == b"x"
    assert checked_headers({}) is None
    for wrong in ({1: "x"}, {"x": 1}, [("x",)], ["xy"], "xy", {"\ud800": "x"}):
        with pytest.raises(InvalidArgument):
            checked_headers(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        checked_key(5)
    assert codec_of("zstd") is Codec.ZSTD
    assert durability_of("synced") == 2
    for call in (lambda: codec_of("gzip"), lambda: durability_of("eternal")):
        with pytest.raises(InvalidArgument):
            call()


class Nobody:
    """One who waits for no outcome."""

    done = False

    def resolve(self, value: Any) -> None: ...

    def fail(self, error: Any) -> None: ...

    def wait(self, timeout: float | None = None) -> Any: ...


def test_columns_begin_with_the_first_message_that_needs_them() -> None:
    parcel = PendingBatch(Nobody(), 0)
    parcel.add(OutgoingMessage("t", b"1"), b"1", 100)
    assert parcel.plain
    parcel.add(OutgoingMessage("t", b"2", b"k", {"a": "b"}, 7, 8, 9, 10), b"2", 100)
    parcel.add(OutgoingMessage("t", None), None, 100)
    with pytest.raises(MessageTooLarge):
        parcel.add(OutgoingMessage("t", bytes(99), b"kk"), bytes(99), 100)
    parcel.encode(50, Codec.NONE, NO_PRODUCER, None)
    assert parcel.batch is not None
    assert parcel.batch.columns() == Columns(
        [b"1", b"2", None],
        [None, b"k", None],
        [50, 7, 50],
        [None, {"a": b"b"}, None],
        [None, 8, None],
        [None, 9, None],
        [None, 10, None],
    )


values_given = st.lists(st.binary(max_size=50), max_size=60)


@given(values_given, st.integers(1, 200), st.integers(1, 20), st.booleans())
def test_portions_hold_everything_in_order(
    values: list[bytes], batch_bytes: int, batch_count: int, keyed: bool
) -> None:
    keys = [b"k%d" % (place % 3) for place in range(len(values))] if keyed else None
    checked = GivenMessages(values, keys).checked(to_bytes)
    made = portions(checked, None, batch_bytes, batch_count, 1000, "t")
    assert [value for portion in made for value in portion.columns.values] == values
    if keys is not None:
        assert [key for portion in made for key in portion.columns.keys or ()] == keys
    for portion in made:
        assert len(portion.columns.values) <= batch_count
        assert portion.size <= batch_bytes or len(portion.columns.values) == 1


def test_many_messages_must_fit_their_keys() -> None:
    with pytest.raises(InvalidArgument, match="1 keys for 2 values"):
        GivenMessages([b"a", b"b"], [b"k"]).checked(to_bytes)
    with pytest.raises(InvalidArgument):
        GivenMessages([b"a", "b"]).checked(to_bytes)
    assert GivenMessages([b"a", None, memoryview(b"c")]).checked(to_bytes).columns.values == [b"a", None, b"c"]


# What comes back.


def test_receipts_that_follow_each_other_become_one() -> None:
    one, two, apart = Receipt("t", 0, 10, 5), Receipt("t", 0, 15, 5), Receipt("t", 0, 30, 1)
    assert [(receipt.offset, receipt.count) for receipt in merged([apart, two, one])] == [(10, 10), (30, 1)]
    assert receipt_at(two, 3) == Receipt("t", 0, 18, 1)


def placed(columns: Columns, base_offset: int, span: int = 0) -> Batch:
    batch = encode(columns, 1, span=span)
    batch.place(base_offset, 2, 3)
    return batch


def test_a_batch_is_cut_and_cleaned() -> None:
    far = TIMESTAMP_US_MAX
    batch = placed(Columns([b"a", b"b", b"c", b"d"], expires=[None, 1, far, None]), 10)
    received = ReceivedBatch("t", 5, batch, 11)
    assert list(received.values) == [b"c", b"d"]
    assert list(received.offsets) == [12, 13]
    assert [(message.offset, message.expires) for message in received.messages()] == [(12, far), (13, None)]
    assert (received.next_offset, len(received)) == (14, 2)
    assert "t[5] 11 to 13" in repr(received)


def test_a_batch_with_holes_is_cut_at_the_right_place() -> None:
    batch = placed(Columns([b"a", b"b", b"c"], places=[0, 5, 9]), 100, span=20)
    received = ReceivedBatch("t", 0, batch, 103)
    assert list(zip(received.offsets, received.values, strict=True)) == [(105, b"b"), (109, b"c")]
    assert received.next_offset == 120


@pytest.mark.parametrize("field", ["timestamp", "due", "expires"])
def test_a_time_that_no_batch_can_hold_is_refused_at_the_door(field: str) -> None:
    many = {"timestamp": "timestamps", "due": "dues", "expires": "expires"}[field]
    first, last = (datetime(1, 1, 3, tzinfo=UTC), datetime(9999, 12, 30, 23, 59, 59, 999_999, tzinfo=UTC))
    for moment in (TIMESTAMP_US_MIN, TIMESTAMP_US_MAX, first, last):
        parcel = PendingBatch(Nobody(), 0)
        parcel.add(OutgoingMessage("t", b"v", **{field: moment}), b"v", 100)
        parcel.encode(1, Codec.NONE, NO_PRODUCER, None)
        assert parcel.batch is not None
        assert received(bytearray(parcel.batch.data)).count == 1
        GivenMessages([b"v"], **{many: [moment]}).checked(to_bytes)
    late = datetime.max.replace(tzinfo=UTC)
    for moment in (TIMESTAMP_US_MIN - 1, TIMESTAMP_US_MAX + 1, 2**63, first - timedelta(microseconds=1), late):
        with pytest.raises(InvalidArgument):
            PendingBatch(Nobody(), 0).add(OutgoingMessage("t", b"v", **{field: moment}), b"v", 100)
        with pytest.raises(InvalidArgument):
            GivenMessages([b"v"], **{many: [moment]}).checked(to_bytes)


def test_a_batch_that_cannot_be_decoded_counts_as_damaged() -> None:
    packed = {name: msgspec.Raw(msgspec.msgpack.encode(column)) for name, column in {"dues": [1 << 63]}.items()}
    bad = encode_raw(RawColumns(msgspec.Raw(msgspec.msgpack.encode([b"b"])), **packed), 1, (1, 1))
    bodies = []
    for offset, batch in enumerate((encode(Columns([b"a"]), 1), bad, encode(Columns([b"c"]), 1))):
        batch.place(offset, 1, 1)
        bodies.append(bytes(batch.data))
    delivered = Delivered(PartitionReader(None, "t", 0, 0), b"".join(bodies))  # type: ignore[arg-type]
    first = delivered.next()
    assert first is not None
    assert list(first.values) == [b"a"]
    with pytest.raises(CorruptBatch) as damage:
        delivered.next()
    assert (damage.value.first_offset, damage.value.next_offset) == (1, 2)
    last = delivered.next()
    assert last is not None
    assert list(last.values) == [b"c"]
    assert delivered.next() is None
