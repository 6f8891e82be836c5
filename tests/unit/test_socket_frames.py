"""The frames of a WebSocket: whatever comes is decoded or refused, and both encodings say the same."""

import json
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.http_client import needs_http
from tests.socket_client import raw_frame

from headrace.model.batch import encode
from headrace.model.envelope import StoredFields, batch_contents, envelope_key

pytestmark = needs_http

frames = pytest.importorskip("headrace.gateways.http.websocket.frames")
HttpError = pytest.importorskip("headrace.gateways.http.problems").HttpError
REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
NUMBERS = st.integers(-(1 << 53), 1 << 53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize("name", ["headrace.json", "headrace.msgpack"])
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_refused(name: str, data: bytes) -> None:
    codec = frames.CODECS[name]
    try:
        if codec.is_text:
            data.decode()
        frame = codec.decode_frame(data)
    except REFUSED:
        codec.encode({"id": codec.given_id(data)}, None)
        return
    assert isinstance(frame.request, str)


@pytest.mark.parametrize("name", ["headrace.json", "headrace.msgpack"])
@given(number=st.integers() | st.integers(1 << 63, 1 << 1100) | st.floats() | st.text() | st.booleans())
def test_any_id_of_a_wrong_frame_can_be_answered(name: str, number: object) -> None:
    codec = frames.CODECS[name]
    try:
        data = json.dumps({"id": number}).encode() if codec.is_text else msgspec.msgpack.encode({"id": number})
    except OverflowError:  # an integer that MessagePack has not
        return
    found = codec.given_id(data)
    codec.encode({"id": found}, None)
    assert found in (None, number)


@pytest.mark.parametrize("name", ["headrace.json", "headrace.msgpack"])
@given(value=VALUES | st.binary(max_size=20))
def test_any_messages_are_envelopes_or_refused(name: str, value: object) -> None:
    codec = frames.CODECS[name]
    try:
        packed = json.dumps(value).encode() if codec.is_text else msgspec.msgpack.encode(value)
    except TypeError:  # bytes in JSON
        return
    with suppress(HttpError):
        assert isinstance(codec.decode_messages(msgspec.Raw(packed)), list)


@given(value=VALUES, key=st.none() | st.text(max_size=9), header=st.none() | st.text(max_size=9))
def test_both_encodings_store_and_show_the_same(value: object, key: str | None, header: str | None) -> None:
    sent = [{"value": value, "key": key, "headers": [["h", header]]}]
    shown = []
    for codec, packed in (
        (frames.CODECS["headrace.json"], json.dumps(sent).encode()),
        (frames.CODECS["headrace.msgpack"], msgspec.msgpack.encode(sent)),
    ):
        (envelope,) = codec.decode_messages(msgspec.Raw(packed))
        fields = StoredFields()
        fields.add(envelope, envelope_key(envelope))
        (content,) = batch_contents(encode(fields.columns(1), 1), 0)
        frame = codec.encode({"push": "Delivery"}, [codec.with_id(codec.item(content), "0:1")])
        shown.append(json.loads(frame) if codec.is_text else msgspec.msgpack.decode(frame))
    first, second = (frame["messages"][0] for frame in shown)
    assert first["value"] == second["value"] == value
    assert first == {**second, "headers": [list(pair) for pair in second["headers"]]}
    assert (first["id"], first.get("key")) == ("0:1", key)


def test_many_tiny_frames_are_parsed_in_several_turns() -> None:
    protocol = pytest.importorskip("websockets.protocol")
    reader_module = pytest.importorskip("headrace.gateways.http.websocket.frame_reader")
    parser = protocol.Protocol(protocol.Side.SERVER, state=protocol.State.OPEN, max_size=1 << 20)
    reader = reader_module.FrameReader(parser)
    reader.add(raw_frame(1, b"") * 40_000)
    turns = []
    while reader.has_more:
        turns.append(len(reader.parse(0.0)))
    assert sum(turns) == 40_000
    assert max(turns) < 300
    reader.add(raw_frame(1, b"x" * 100_000))
    assert [len(frame.data) for frame in reader.parse(0.0)] == [100_000]
