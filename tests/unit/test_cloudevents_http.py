"""CloudEvents over HTTP: messages become requests in each mode, and come back as they were."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.cloudevents import CloudEvent
from headrace.model.cloudevents_http import (
    BATCH,
    EventMessage,
    EventOrigin,
    HttpEvent,
    encode_batch,
    encode_binary,
    encode_structured,
    event_mode,
    header_text,
    header_value,
    message_event,
    parse_binary,
    parse_event,
    split_batch,
    time_text,
)
from headrace.model.envelope import message_content
from headrace.model.errors import InvalidEvent
from headrace.model.limits import TIMESTAMP_US_MAX, TIMESTAMP_US_MIN
from headrace.model.message import Message

ORIGIN = EventOrigin("b1", "orders", 2)
REQUIRED = {"ce-specversion": "1.0", "ce-id": "7", "ce-source": "/till", "ce-type": "sold"}
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cn"]), min_size=1)
NAMES = st.from_regex(r"[a-z0-9]{1,20}", fullmatch=True).filter(
    lambda name: name not in ("data", "datacontenttype", "specversion", "id", "source", "type", "time", "partitionkey")
)
ATTRIBUTES = st.builds(
    lambda required, more: {"specversion": "1.0", **more, **required},
    st.fixed_dictionaries(
        {"id": TEXT, "source": TEXT, "type": TEXT},
        optional={"partitionkey": TEXT, "subject": TEXT, "time": st.just("2026-11-18T02:00:00.123456789+01:00")},
    ),
    st.dictionaries(NAMES, TEXT, max_size=3),
)
CONTENT = st.one_of(
    st.tuples(st.none(), st.none()),
    st.tuples(st.sampled_from(["application/json", "text/json; v=1"]), st.sampled_from([b"[1, 2]", b'"a"', b"null"])),
    st.tuples(st.sampled_from(["text/plain", "image/png", "application/xml", "application/json"]), st.binary()),
)
EVENTS = st.builds(lambda attributes, content: CloudEvent(attributes, *content), ATTRIBUTES, CONTENT)


def stored(message: EventMessage, timestamp: int = 5) -> Message:
    """The message that a topic has after this was published."""
    return Message(17, message.value, message.timestamp or timestamp, message.key, message.headers)


def parsed(request: HttpEvent) -> EventMessage:
    """The message of a request with one event."""
    mode = event_mode(request.headers)
    return parse_binary(*request) if mode == "binary" else parse_event(request.body)


@given(EVENTS, st.sampled_from([encode_binary, encode_structured]), st.sampled_from([encode_binary, encode_structured]))
def test_an_event_comes_back_as_it_was_in_whatever_modes(event: CloudEvent, sent: Any, read: Any) -> None:
    first = parsed(sent(event))
    assert first.key == (event.attributes["partitionkey"].encode() if "partitionkey" in event.attributes else None)
    back = parsed(read(message_event(stored(first), ORIGIN)))
    found = message_event(stored(back), ORIGIN)
    assert found.attributes == {"time": "1970-01-01T00:00:00.000005Z", **event.attributes}
    assert (found.content_type, found.data) == (event.content_type, event.data)


@given(st.lists(EVENTS, max_size=4))
def test_events_survive_a_batch(events: list[CloudEvent]) -> None:
    request = encode_batch(events)
    assert event_mode(request.headers) == "batch"
    assert [parse_event(one) for one in split_batch(request.body)] == [parsed(encode_structured(one)) for one in events]


@given(TEXT)
def test_header_values_are_printable_ascii(text: str) -> None:
    encoded = header_value(text)
    assert encoded.isascii()
    assert encoded.isprintable()
    assert not set(encoded) & {" ", '"'}
    assert header_text("ce-a", encoded) == text


@given(
    st.none() | st.binary(),
    st.none() | st.binary(),
    st.dictionaries(st.sampled_from(["ce_specversion", "ce_id", "content-type", "Content-Type", "x"]), st.binary()),
    st.integers(TIMESTAMP_US_MIN, TIMESTAMP_US_MAX),
)
def test_every_message_is_an_event(value: Any, key: Any, headers: Any, timestamp: int) -> None:
    event = message_event(Message(3, value, timestamp, key, headers or None), ORIGIN)
    assert event.attributes["id"] == "orders/2/3"
    assert event.data == value
    for mode in (encode_binary, encode_structured):
        back = parsed(mode(event))
        assert back.value == value or (mode is encode_binary and not value)
        assert back.timestamp == timestamp


@pytest.mark.parametrize(
    ("value", "headers", "kind", "content_type"),
    [
        (None, None, "deleted", None),
        (b"a", None, "text", "text/plain; charset=UTF-8"),
        (b"\xff", None, "bytes", "application/octet-stream"),
        (b"[1]", {"content-type": b"application/json"}, "json", "application/json"),
        (b"a", {"Content-Type": b"text/csv"}, "text", "text/csv"),
        (b"a", {"content-type": b"image/png"}, "bytes", "image/png"),
        (b"a", {"content-type": b"no\r\nheader"}, "text", "text/plain; charset=UTF-8"),
        (b"a", {"ce_specversion": b"0.3"}, "text", "text/plain; charset=UTF-8"),
    ],
)
def test_a_message_without_attributes_gets_some(value: Any, headers: Any, kind: str, content_type: Any) -> None:
    event = message_event(Message(17, value, 0, b"ann", headers), ORIGIN)
    assert event.attributes == {
        "specversion": "1.0",
        "id": "orders/2/17",
        "source": "headrace:b1/topics/orders",
        "type": f"headrace.message.{kind}",
        "time": "1970-01-01T00:00:00Z",
        "partitionkey": "ann",
    }
    assert event.content_type == content_type


def test_a_message_that_was_stored_as_structured_event_is_that_event() -> None:
    value = json.dumps({"specversion": "1.0", "id": "1", "source": "/a", "type": "t", "n": 3, "data": {"a": 1}})
    message = Message(0, value.encode(), 0, None, {"content-type": b"application/cloudevents+json; charset=UTF-8"})
    request = encode_structured(message_event(message, ORIGIN))
    added = {"time": "1970-01-01T00:00:00Z", "datacontenttype": "application/json"}
    assert json.loads(request.body) == {**json.loads(value), **added}


def test_an_attribute_that_is_null_is_left_out() -> None:
    event = {"specversion": "1.0", "id": "1", "source": "/a", "type": "t", "subject": None, "datacontenttype": None}
    message = parse_event(json.dumps({**event, "data": None}).encode())
    assert list(message.headers) == ["ce_specversion", "ce_id", "ce_source", "ce_type", "content-type"]
    assert message.value == b"null"


def test_data_whose_type_is_not_told_is_json() -> None:
    event = {"specversion": "1.0", "id": "1", "source": "/a", "type": "t", "data": {"n": [1]}}
    message = parse_event(json.dumps(event).encode())
    assert message.headers["content-type"] == b"application/json"
    shown = message_content(stored(message), 0)
    assert isinstance(shown.value, msgspec.Raw)
    assert json.loads(bytes(shown.value)) == {"n": [1]}
    del event["data"]
    assert "content-type" not in parse_event(json.dumps(event).encode()).headers


def test_attributes_with_a_hyphen_are_read_too() -> None:
    headers = {"ce-specversion": b"1.0", "ce-id": b"7", "ce-source": "/ü".encode(), "ce-type": b"t"}
    event = message_event(Message(0, b"1", 0, None, {**headers, "other": b"x"}), ORIGIN)
    assert event.attributes == {
        "specversion": "1.0", "id": "7", "source": "/ü", "type": "t", "time": "1970-01-01T00:00:00Z",
    }  # fmt: skip


def test_types_of_attributes_survive_the_log() -> None:
    event = {"specversion": "1.0", "id": "1", "source": "/a", "type": "t", "n": 3, "ok": False, "text": "3"}
    message = parse_event(json.dumps(event).encode())
    back = encode_structured(message_event(stored(message), ORIGIN))
    assert json.loads(back.body) == {**event, "time": "1970-01-01T00:00:00.000005Z"}


def test_an_event_in_an_event_is_never_sent_in_binary_mode() -> None:
    event = CloudEvent(
        {"specversion": "1.0", "id": "1", "source": "/a", "type": "t"}, "application/cloudevents+json", b"{}"
    )
    assert encode_binary(event) == encode_structured(event)


@pytest.mark.parametrize(
    ("headers", "mode"),
    [
        ({}, None),
        ({"content-type": "application/json"}, None),
        (REQUIRED, "binary"),
        ({**REQUIRED, "content-type": "application/cloudevents+json"}, "structured"),
        ({"content-type": "Application/CloudEvents+JSON; charset=utf-8"}, "structured"),
        ({"content-type": BATCH}, "batch"),
    ],
)
def test_the_mode_is_that_of_the_content_type(headers: Any, mode: str | None) -> None:
    assert event_mode(headers) == mode


@pytest.mark.parametrize(
    "content_type",
    ["application/cloudevents+avro", "application/cloudevents", "application/cloudevents+json; charset=latin-1"],
)
def test_other_formats_are_refused(content_type: str) -> None:
    with pytest.raises(InvalidEvent, match="UTF-8"):
        event_mode({"content-type": content_type})


@pytest.mark.parametrize(
    ("changed", "attribute"),
    [
        ({"ce-id": ""}, "id"),
        ({"ce-specversion": "0.3"}, "specversion"),
        ({"ce-time": "yesterday"}, "time"),
        ({"ce-time": "2026-11-18T02:00:00"}, "time"),
        ({"ce-time": "0000-11-18T02:00:00Z"}, "time"),
        ({"ce-subject": "%C0%A0"}, "subject"),
        ({"ce-subject": "a%0Db"}, "subject"),
        ({"ce-datacontenttype": "text/plain"}, "datacontenttype"),
        ({"content-type": "nothing"}, "datacontenttype"),
    ],
)
def test_a_wrong_attribute_is_named(changed: Any, attribute: str) -> None:
    with pytest.raises(InvalidEvent, match=attribute) as refused:
        parse_binary({**REQUIRED, **changed}, b"")
    assert refused.value.details["attribute"] == attribute


@pytest.mark.parametrize("name", ["ce-id", "ce-source", "ce-type"])
def test_a_missing_attribute_is_named(name: str) -> None:
    with pytest.raises(InvalidEvent, match="missing"):
        parse_binary({other: text for other, text in REQUIRED.items() if other != name}, b"")


def test_header_values_of_older_senders_are_read() -> None:
    assert header_text("ce-a", r'"two words \"quoted\""') == 'two words "quoted"'
    assert header_text("ce-a", "50%") == "50%"
    assert header_text("ce-a", "%e2%82%ac") == "€"


@pytest.mark.parametrize("body", [b"", b"{}", b"[", b"1", b'["\xff"]'])
def test_what_is_no_batch_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidEvent, match="array"):
        split_batch(body)


def test_a_leap_second_is_stored_as_the_second_before() -> None:
    message = parse_binary({**REQUIRED, "ce-time": "2016-12-31T23:59:60Z"}, b"")
    assert message.headers["ce_time"] == b"2016-12-31T23:59:60Z"
    assert time_text(message.timestamp or 0) == "2016-12-31T23:59:59Z"
