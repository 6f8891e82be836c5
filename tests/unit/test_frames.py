"""Frames of the native protocol, and the page that describes them."""

import enum
import re
import tracemalloc
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace.wire
from headrace.model import errors, subscription, topic
from headrace.model.batch import received
from headrace.model.errors import HeadraceError, ProtocolError, TopicNotFound, error_of
from headrace.model.headers import Headers
from headrace.model.limits import FRAME_BYTES_MAX
from headrace.model.request import WireStruct
from headrace.model.requests import Publish
from headrace.wire.frames import HEADER_BYTES, RECEIVED_BYTES, Frame, Frames, Memory, frame
from headrace.wire.native import (
    ANSWERS,
    PUSHES,
    REQUESTS,
    Failure,
    Hello,
    Kind,
    decode,
    decode_answer,
    failure,
)

PAGE = (Path(headrace.wire.__file__).parent / "PROTOCOL.md").read_text(encoding="utf-8")


class Said(msgspec.Struct, frozen=True):
    """A frame that lasts, to compare."""

    kind: int
    correlation: int
    head: bytes
    body: bytes


def said(found: Frame) -> Said:
    return Said(found.kind, found.correlation, bytes(found.head), bytes(found.body))


def whole(one: Said) -> bytes:
    return bytes(frame(one.kind, one.correlation, msgspec.Raw(one.head), len(one.body))) + one.body


def split(frames: Frames, stream: bytes, pieces: list[int]) -> list[Said]:
    """What comes out when a stream arrives in pieces of these sizes, over and over."""
    found, position, turn = [], 0, 0
    while position < len(stream):
        buffer = frames.buffer()
        count = min(len(buffer), max(pieces[turn % len(pieces)], 1), len(stream) - position)
        buffer[:count] = stream[position : position + count]
        found += [said(one) for one in frames.received(count)]
        position += count
        turn += 1
    return found


heads = st.dictionaries(st.text(max_size=8), st.integers(-(2**63), 2**63 - 1), max_size=4).map(msgspec.msgpack.encode)
bodies = st.binary(max_size=200) | st.integers(0, 3 * RECEIVED_BYTES).map(lambda length: b"b" * length)
frames_said = st.builds(Said, st.integers(0, 255), st.integers(0, 2**32 - 1), heads, bodies)
sizes = st.lists(st.integers(1, 40) | st.integers(1, 2 * RECEIVED_BYTES), min_size=1, max_size=8)


@given(st.lists(frames_said, max_size=6), sizes)
def test_any_split_of_any_frames_gives_the_same_frames(sent: list[Said], pieces: list[int]) -> None:
    stream = b"".join(map(whole, sent))
    if min(pieces) < 100 and len(stream) > RECEIVED_BYTES:  # in tiny pieces that would take forever
        pieces = [*pieces, RECEIVED_BYTES]
    assert split(Frames(), stream, pieces) == sent


@given(st.lists(st.tuples(st.integers(0, 2), frames_said), max_size=8), st.data())
def test_connections_may_share_the_memory_in_which_they_receive(sent: list[tuple[int, Said]], data: Any) -> None:
    memory = Memory()
    connections = [Frames(memory) for _ in range(3)]
    streams = [b"".join(whole(one) for number, one in sent if number == at) for at in range(3)]
    found: list[list[Said]] = [[], [], []]
    while any(streams):
        at = data.draw(st.sampled_from([at for at in range(3) if streams[at]]))
        buffer = connections[at].buffer()
        count = min(len(buffer), len(streams[at]), data.draw(st.sampled_from([1, 17, 1000, RECEIVED_BYTES])))
        if len(streams[at]) > RECEIVED_BYTES:
            count = min(len(buffer), RECEIVED_BYTES)
        buffer[:count] = streams[at][:count]
        streams[at] = streams[at][count:]
        found[at] += [said(one) for one in connections[at].received(count)]
    assert found == [[one for number, one in sent if number == at] for at in range(3)]


@given(st.lists(st.binary(max_size=80), max_size=10))
def test_random_bytes_are_frames_or_refused(pieces: list[bytes]) -> None:
    frames = Frames()
    try:
        for piece in pieces:
            buffer = frames.buffer()
            buffer[: len(piece)] = piece[: len(buffer)]
            list(frames.received(min(len(piece), len(buffer))))
    except ProtocolError:
        return
    assert frames.pending_bytes <= sum(map(len, pieces))


def test_announcing_a_large_frame_takes_no_memory() -> None:
    announced = bytes(frame(Kind.PUBLISH, 1, Publish("orders", 0), FRAME_BYTES_MAX - 1000))
    tracemalloc.start()
    try:
        memory = Memory()
        many = [Frames(memory) for _ in range(20)]
        before, _ = tracemalloc.get_traced_memory()
        for frames in many:
            assert split(frames, announced, [len(announced)]) == []
        after, _ = tracemalloc.get_traced_memory()
        assert after - before < 20 * 2 * RECEIVED_BYTES
        assert split(many[0], bytes(1 << 20), [50_000]) == []
        more, _ = tracemalloc.get_traced_memory()
        assert more - after < 3 << 20, "memory comes with the bytes, not before"
        assert many[0].pending_bytes == len(announced) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_large_frame_has_memory_of_its_own() -> None:
    body = bytes(range(256)) * 4096
    frames = Frames()
    data = whole(Said(Kind.PUBLISH, 7, b"\x80", body))
    first: list[Frame] = []
    position = 0
    while not first:
        buffer = frames.buffer()
        count = min(len(buffer), len(data) - position)
        buffer[:count] = data[position : position + count]
        first = list(frames.received(count))
        position += count
    frames.buffer()[:10] = b"0123456789"
    assert first[0].lasting
    assert bytes(first[0].body) == body
    assert not first[0].body.readonly


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ((FRAME_BYTES_MAX + 1, 1, 1, 0, 1, 0), "at most"),
        ((0xFFFFFFFF, 1, 1, 0, 1, 0), "at most"),
        ((10, 1, 1, 0, 1, 11), "longer than the frame"),
        ((10, 1, 2, 0, 1, 0), "version 2"),
    ],
)
def test_impossible_frames_are_refused_at_the_header(header: tuple[int, ...], why: str) -> None:
    length, kind, version, spare, correlation, head_length = header
    data = length.to_bytes(4, "little") + bytes([kind, version]) + spare.to_bytes(2, "little")
    data += correlation.to_bytes(4, "little") + head_length.to_bytes(4, "little")
    assert len(data) == HEADER_BYTES
    with pytest.raises(ProtocolError, match=why):
        split(Frames(), data, [HEADER_BYTES])


def test_head_that_is_no_map_is_a_protocol_error() -> None:
    for head in (b"", b"\xc1", b"\x01", b"\x81\xa5topic\x01", b"\x80"):
        with pytest.raises(ProtocolError):
            decode(Kind.PUBLISH, memoryview(head))


@pytest.mark.parametrize("kind", errors._BY_CODE.values(), ids=lambda kind: kind.code)
def test_every_error_comes_out_as_it_went_in(kind: type[HeadraceError]) -> None:
    error = error_of(kind.code, "what happened", kind.retryable, {"first_offset": 3})
    data = frame(Kind.FAILURE, 1, failure(error))
    with pytest.raises(kind, match="what happened") as caught:
        decode_answer(Kind.PUBLISH, Kind.FAILURE, memoryview(data)[HEADER_BYTES:])
    assert (caught.value.code, caught.value.retryable) == (kind.code, kind.retryable)
    assert caught.value.details == {"first_offset": 3}


# The page


def examples() -> dict[str, bytes]:
    """The bytes that the page shows, by name."""
    return {name: bytes.fromhex(text) for name, text in re.findall(r"```hex (\w+)\n(.*?)```", PAGE, re.DOTALL)}


def test_example_is_what_really_goes_over_the_wire() -> None:
    shown = examples()
    hello, publish, published, failed = (
        split(Frames(), shown[name], [7]) for name in ("hello", "publish", "published", "failure")
    )
    assert decode(Kind.HELLO, memoryview(hello[0].head)) == Hello(client="example 1.0", name="billing")
    assert (hello[0].kind, hello[0].correlation) == (Kind.HELLO, 1)
    assert shown["hello"] == frame(Kind.HELLO, 1, Hello(client="example 1.0", name="billing"))
    assert decode(publish[0].kind, memoryview(publish[0].head)) == Publish("orders", 0)
    batch = received(bytearray(publish[0].body))
    assert (batch.columns().values, batch.columns().keys) == ([b"hello", b"world"], [b"a", None])
    assert batch.producer_id >= 16
    answer = decode_answer(Kind.PUBLISH, published[0].kind, memoryview(published[0].head))
    assert (answer.base_offset, answer.durability, published[0].correlation) == (0, 2, publish[0].correlation)
    with pytest.raises(TopicNotFound):
        decode_answer(Kind.FETCH, failed[0].kind, memoryview(failed[0].head))


def row(name: str) -> str:
    """The line of a table that tells of something."""
    found = [line for line in PAGE.splitlines() if re.match(rf"\|[ \d]*\|? ?`?{name}`? \|", line)]
    assert len(found) == 1, f"{name} has {len(found)} lines on the page"
    return found[0]


def shown_type(kind: Any) -> str:
    """A type as the page writes it."""
    if kind == Headers:
        return "headers"
    inner = [one for one in get_args(kind) if one is not type(None)]
    if type(None) in get_args(kind):
        return f"{shown_type(inner[0])}?"
    if getattr(kind, "__origin__", None) is list:
        return f"[{shown_type(inner[0])}]"
    if getattr(kind, "__origin__", None) is dict:
        return f"{{{shown_type(inner[0])}: {shown_type(inner[1])}}}"
    return "any" if kind is Any else str(kind.__name__)


def shown_default(field: msgspec.structs.FieldInfo) -> str:
    """A default as the page writes it."""
    if field.required:
        return ""
    default = field.default
    if default is msgspec.NODEFAULT:
        assert callable(field.default_factory)
        default = field.default_factory()
    if isinstance(default, str | bytes):
        text = default if isinstance(default, str) else default.decode()
        return f' = "{text}"'.replace("*", "\\*")
    if isinstance(default, WireStruct):
        return " = {}"
    words = {"None": "nil", "True": "true", "False": "false"}
    return f" = {words.get(str(default), default)}"


def tell_fields(head: type[WireStruct], text: str) -> None:
    """All fields stand in the text, with their types and defaults."""
    for field in msgspec.structs.fields(head):
        wanted = f"`{field.encode_name}` {shown_type(field.type)}{shown_default(field)}"
        assert wanted in text, f"{head.__name__}: {wanted!r} is missing in {text}"


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_page_tells_every_kind(kind: Kind) -> None:
    number, _, *cells = (cell.strip() for cell in row(kind.name).split("|")[1:-1])
    assert int(number) == kind.value
    if kind in REQUESTS:
        tell_fields(REQUESTS[kind], cells[0])
        tell_head(ANSWERS.get(kind), cells[1])
    elif kind in PUSHES:
        tell_head(PUSHES[kind], cells[1])


def tell_head(head: type[WireStruct] | None, cell: str) -> None:
    """A cell of the table tells of a head, or names it and there is a line for it."""
    name = head.__name__ if head is not None else "none"
    assert re.match(rf"{name}\b", cell)
    if head is not None:
        tell_fields(head, cell if "`" in cell else row(name))


def test_page_tells_every_part_of_a_head() -> None:
    heads = [*REQUESTS.values(), *ANSWERS.values(), *PUSHES.values()]
    fields = [field for head in heads for field in msgspec.structs.fields(head)]
    for part in {Failure}.union(*(parts_of(field.type) for field in fields)):
        tell_fields(part, row(part.__name__))


def parts_of(kind: Any) -> set[Any]:
    """The heads that a type is made of."""
    if isinstance(kind, type) and issubclass(kind, WireStruct):
        return {kind}.union(*(parts_of(field.type) for field in msgspec.structs.fields(kind)))
    return set().union(*map(parts_of, get_args(kind)))


@pytest.mark.parametrize("kind", errors._BY_CODE.values(), ids=lambda kind: kind.code)
def test_page_tells_every_error(kind: type[HeadraceError]) -> None:
    text = " ".join((kind.__doc__ or "").split())
    assert f"| `{kind.code}` | {'yes' if kind.retryable else 'no'} | {text} |" in PAGE


@pytest.mark.parametrize(
    ("title", "settings"),
    [("Topics", topic.TopicSettings), ("Leased subscriptions", subscription.SubscriptionSettings)],
)
def test_page_tells_every_setting(title: str, settings: type[msgspec.Struct]) -> None:
    section = PAGE.partition(f"## {title}")[2].partition("\n## ")[0]
    for field in msgspec.structs.fields(settings):
        assert f"`{field.name}`" in section
        if isinstance(field.type, type) and issubclass(field.type, enum.Enum):
            for word in field.type:
                assert f'"{word.name.lower()}"' in section


def test_page_tells_the_limits_that_there_are() -> None:
    from headrace.gateways.native.connection import UNANSWERED_MAX
    from headrace.model import limits

    for number in (FRAME_BYTES_MAX, limits.BATCH_BYTES_MAX, limits.BATCH_COUNT_MAX, limits.STREAMS_MAX, UNANSWERED_MAX):
        assert f"{number:,}" in PAGE.partition("## Limits")[2]
