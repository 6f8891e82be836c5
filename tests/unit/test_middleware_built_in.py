"""The middleware of Headrace itself."""

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.middleware import API, Columns, MiddlewareContext, RefusedMessages
from headrace.middleware.combine import CombineMiddleware
from headrace.middleware.enrich import EnrichMiddleware
from headrace.middleware.pattern_cost import pattern_cost
from headrace.middleware.redact import make_redact, parse_path
from headrace.middleware.schema import SchemaMiddleware
from headrace.middleware.schema_cost import COST_MAX, schema_cost
from headrace.middleware.split import SplitMiddleware
from headrace.middleware.transform import json_to_msgpack, make_transform, msgpack_to_json
from headrace.model.batch import Producer
from headrace.model.cloudevents import to_binary, to_structured
from headrace.model.codec import Codec
from headrace.model.errors import InvalidArgument, InvalidEvent, MessageRefused
from headrace.model.headers import RepeatedHeaders
from headrace.model.middleware import may_deliver
from headrace.model.requests import Publish, TopicCreate
from headrace.plugins import BUILT_IN, MIDDLEWARE, load_plugin
from headrace.testing.workbench import Workbench

CONTEXT = MiddlewareContext("orders", "acme", 0, 1_800_000_000_000_000, "ann", "till", "10.0.0.1:5", "native")


def reasons_of(outcome: Columns | RefusedMessages) -> dict[int, str]:
    return dict(outcome.reasons) if isinstance(outcome, RefusedMessages) else {}


def values_of(outcome: Columns | RefusedMessages) -> list[bytes | None]:
    assert isinstance(outcome, Columns)
    return list(outcome.values)


def test_all_are_declared_as_entry_points_and_load() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["headrace.middleware"] == BUILT_IN[MIDDLEWARE]
    for name in BUILT_IN[MIDDLEWARE]:
        assert load_plugin(MIDDLEWARE, name).api == API
        assert not may_deliver([{"name": name}])
    assert may_deliver([{"name": "another"}])


# compress


def test_compress_stores_large_and_gathered_batches_compressed() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("orders", {"middleware": [{"name": "compress", "codec": "lz4"}]}))
    large = [b"x" * 100] * 1000
    bench.ask(Publish("orders", 0), bench.batch(large, keys=[b"k"] * 1000).data)
    small = [bench.begin(Publish("orders", 0), bench.batch([b"y" * 500]).data) for _ in range(10)]
    bench.run()
    assert all(answer.resolved for answer in small)
    first, second = bench.batches("orders")
    assert (first.codec, second.codec) == (Codec.LZ4, Codec.LZ4)
    assert first.length < 5000
    assert first.columns().keys == [b"k"] * 1000
    assert bench.values("orders") == large + [b"y" * 500] * 10


def test_compress_goes_with_other_middleware() -> None:
    bench = Workbench()
    entries = [{"name": "redact", "fields": ["$.a"]}, {"name": "compress", "codec": "zstd"}]
    bench.ask(TopicCreate("orders", {"middleware": entries}))
    bench.publish("orders", [b'{"a":1,"b":"%d"}' % at**9 for at in range(200)])
    (batch,) = bench.batches("orders")
    assert batch.codec == Codec.ZSTD
    assert json.loads(batch.columns().values[0] or b"")["a"] == "***"


# enrich


def test_enrich_says_who_published_and_cannot_be_forged() -> None:
    forged = [{"headrace-client": b"boss", "own": b"1"}, None, RepeatedHeaders(["headrace-identity"] * 2, [b"a", b"b"])]
    made = EnrichMiddleware({}).on_publish(Columns([b"1", b"2", b"3"], headers=forged), CONTEXT)
    assert made.headers is not None
    told = {
        "headrace-client": b"till",
        "headrace-identity": b"ann",
        "headrace-address": b"10.0.0.1:5",
        "headrace-gateway": b"native",
        "headrace-time": b"1800000000000000",
    }
    assert made.headers[0] == {**told, "own": b"1"}
    assert made.headers[1] == told
    assert made.headers[2] == told
    some = EnrichMiddleware({"fields": ["time"], "prefix": "x-"}).on_publish(Columns([b"1"]), CONTEXT)
    assert some.headers == [{"x-time": b"1800000000000000"}]
    unknown = EnrichMiddleware({"fields": ["identity"]})
    anonymous = msgspec.structs.replace(CONTEXT, identity="")
    made = unknown.on_publish(Columns([b"1"], headers=[{"headrace-identity": b"boss"}]), anonymous)
    assert made.headers == [{"headrace-identity": b""}]
    with pytest.raises(InvalidArgument, match="'fields' is a list of"):
        EnrichMiddleware({"fields": ["password"]})


# schema

ORDER = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "mail": {"type": "string", "pattern": "^[^@]+@[^@]+$"}},
    "required": ["id"],
}


def test_schema_says_where_a_value_is_wrong_but_not_the_value() -> None:
    schema = SchemaMiddleware({"schema": ORDER})
    values = [b'{"id":1}', b'{"id":"secret"}', b'{"mail":"x"}', b"{", None, b'{"id":1,"mail":"secret"}']
    reasons = reasons_of(schema.on_publish(Columns(values), CONTEXT))
    assert sorted(reasons) == [1, 2, 3, 4, 5]
    assert "/id: type" in reasons[1]
    assert "/mail: pattern" in reasons[5]
    assert "required" in reasons[2]
    assert reasons[3] == "the value is not JSON"
    assert reasons[4] == "the message has no value"
    assert not any("secret" in reason for reason in reasons.values())


def doubling(depth: int) -> dict[str, Any]:
    """A schema whose validation takes 2 to the power of depth steps."""
    defs: dict[str, Any] = {
        f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}, {"$ref": f"#/$defs/d{at + 1}"}]} for at in range(depth)
    }
    return {"$defs": {**defs, f"d{depth}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (doubling(40), "could take too long"),
        ({"properties": {"a": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}}, "could take too long"),
        ({"items": {"anyOf": [{"$ref": "#"}, {"items": {"$ref": "#"}}]}, "contains": {"$ref": "#"}}, "too long"),
        ({"enum": list(range(10_000))}, "could take too long"),
        ({"$ref": "#"}, "leads back to itself"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "leads back to itself"),
        ({"$ref": "http://127.0.0.1/schema"}, "other documents are not read"),
        ({"$ref": "#/$defs/none"}, "nothing at the \\$ref"),
        ({"$id": "http://example.com/a", "type": "object"}, "must not use \\$id"),
        ({"$dynamicRef": "#a"}, "must not use \\$dynamicRef"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "\\$schema is one of"),
        ({"pattern": "^(([a-z]{1,30}){1,60})*x$"}, "patterns are too complex"),
        ({"allOf": [{"pattern": f"[ab]{{{at}}}x"} for at in range(95, 107)]}, "patterns are too complex"),
        ({"patternProperties": {"^(([a-z]{1,60}){1,10})*x$": True}}, "patterns are too complex"),
        ({"propertyNames": {"pattern": "(?i)(([a-z]{1,60}){1,10})*x"}}, "patterns are too complex"),
        ({"properties": {f"p{at}": {"pattern": f"^.{{{at}}}$"} for at in range(200, 215)}}, "patterns .* too large"),
        ({"enum": [{"a": at} for at in range(1000)]}, "could take too long"),
        ({"multipleOf": 1e-300}, "multipleOf must be from"),
        ({"dependentRequired": {f"n{at}": ["x"] for at in range(5000)}}, "could take too long"),
        ({"type": "nothing"}, "no valid JSON Schema"),
        ({"pattern": "(a)\\1"}, "no valid JSON Schema"),
        ({"pattern": "(?=a)b"}, "no valid JSON Schema"),
        ({"properties": {f"p{at}": {} for at in range(3000)}}, "at most 2000 subschemas"),
    ],
)
def test_schemas_that_could_stall_the_broker_are_refused(schema: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        SchemaMiddleware({"schema": schema})


def test_ordinary_schemas_cost_little() -> None:
    tree = {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "value": {"type": "integer"}}}
    anything = {
        "anyOf": [
            {"type": ["string", "number", "boolean", "null"]},
            {"type": "array", "items": {"$ref": "#"}},
            {"type": "object", "additionalProperties": {"$ref": "#"}},
        ]
    }
    for schema in (ORDER, tree, anything, {"enum": ["a", "b"]}, True, {"properties": {"$id": {"type": "string"}}}):
        assert 1 <= schema_cost(schema, len).cost <= 10 < COST_MAX


def test_patterns_run_without_backtracking() -> None:
    evil = SchemaMiddleware({"schema": {"pattern": "^(a+)+$"}})
    value = b'"' + b"a" * 50_000 + b'!"'  # a backtracking engine would never end
    assert list(reasons_of(evil.on_publish(Columns([value]), CONTEXT))) == [0]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"pattern": "^(([a-z]{1,60}){1,10})*x$"}, json.dumps("a" * 250_000)),
        ({"items": {"pattern": "^(([a-z]{1,60}){1,10})*x$"}}, json.dumps(["a" * 250] * 100)),
        ({"patternProperties": {"[ab]*a[ab]{100}x": True}}, json.dumps({"ab" * 1000: 1})),
        ({"items": {"multipleOf": 0.01}}, json.dumps([1e300] * 10_000)),
        ({"items": {"multipleOf": 0.01}}, json.dumps([10**300] * 10)),
    ],
)
def test_values_that_could_take_too_long_are_refused_before_they_are_validated(schema: Any, value: str) -> None:
    middleware = SchemaMiddleware({"schema": schema})
    (reason,) = reasons_of(middleware.on_publish(Columns([value.encode()]), CONTEXT)).values()
    assert "too large to validate" in reason


def test_ordinary_patterns_and_numbers_are_validated_in_large_values() -> None:
    mail = {"type": "string", "pattern": "^[^@]+@[^@]+$"}
    name = {"type": "string", "pattern": "^[a-z0-9-]{1,63}$"}
    order = {"items": {"properties": {"mail": mail, "name": name, "price": {"multipleOf": 0.01}}}}
    middleware = SchemaMiddleware({"schema": order})
    assert SchemaMiddleware({"schema": ORDER}).inline
    rows = [{"mail": "ann@example.org", "name": "a-b", "price": 1.25}] * 500
    values = [json.dumps(rows).encode(), json.dumps([*rows, {"name": "A"}]).encode()]
    assert reasons_of(middleware.on_publish(Columns(values), CONTEXT)) == {
        1: "the schema does not allow the value at /500/name: pattern"
    }
    dates = SchemaMiddleware({"schema": {"items": {"pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}}})
    assert reasons_of(dates.on_publish(Columns([json.dumps(["2026-11-18"] * 40_000).encode()]), CONTEXT)) == {}


def test_patterns_that_take_long_are_not_matched_on_the_event_loop() -> None:
    assert not SchemaMiddleware({"schema": {"pattern": "^(([a-z]{1,60}){1,10})*x$"}}).inline
    assert not SchemaMiddleware({"schema": {"allOf": [{"type": "array"}] * 100}}).inline
    assert not SchemaMiddleware({"schema": {"multipleOf": 0.01}}).inline


@pytest.mark.parametrize(
    ("pattern", "width"),
    [
        ("^[A-Z]{2}[0-9]{6}$", 1),
        ("^(?:ab|cd)+$", 2),
        ("^.{1,255}$", 1),
        ("[ab]*a[ab]{20}x", 23),
        ("^a|b{9}", 10),
        ("^(a?){30}$", 30),
        ("^a{2,}(b{5})*c$", 7),
        ("^(([a-z]{1,60}){1,10})*x$", 601),
        (r"^\p{L}+$", 8),
        (r"^[\w.-]+@(\w+\.)+\w{2,3}$", 7),
    ],
)
def test_the_width_of_a_pattern_counts_what_repeats(pattern: str, width: int) -> None:
    assert pattern_cost(pattern, len).width == width


@pytest.mark.parametrize(
    "pattern", ["(?i)a", "[a&&b]", "[[a]b]", r"\x41", "a{,5}", "(?m)^a", "a**", "]", "(" * 60 + ")" * 60]
)
def test_other_patterns_are_measured(pattern: str) -> None:
    assert pattern_cost(pattern, lambda _: 5_000) == (51, 5_000)


def test_many_errors_are_not_gathered() -> None:
    names = [f"n{at}" for at in range(300)]
    schema = SchemaMiddleware({"schema": {"anyOf": [{"items": {"required": names}}, {"type": "string"}]}})
    reasons = reasons_of(schema.on_publish(Columns([json.dumps([{}] * 5_000).encode(), b"[{}]"]), CONTEXT))
    assert reasons[0] == "the schema does not allow the value"
    assert reasons[1] == "the schema does not allow the value at its root: anyOf"


def test_deep_values_are_refused_and_do_not_crash() -> None:
    schema = SchemaMiddleware({"schema": {"type": "array", "items": {"$ref": "#"}}})
    for depth in (500, 100_000):
        outcome = schema.on_publish(Columns([b"[" * depth + b"1" + b"]" * depth]), CONTEXT)
        assert list(reasons_of(outcome)) == [0]


# redact


def test_redact_replaces_fields_and_headers() -> None:
    redact: Any = make_redact({"fields": ["$.card", "$.people[*].name", "$['a b'][0]"], "headers": ["token"]})
    value = b'{"card":1,"people":[{"name":"x","age":3},{"age":4},5],"a b":[7,8]}'
    headers = [{"token": b"t", "other": b"o"}]
    made = redact.on_publish(Columns([value], headers=headers), CONTEXT)
    hidden = {"card": "***", "people": [{"name": "***", "age": 3}, {"age": 4}, 5], "a b": ["***", 8]}
    assert json.loads(made.values[0]) == hidden
    assert made.headers == [{"token": b"***", "other": b"o"}]
    untouched = b'{ "other" : 1.50 }'
    assert redact.on_publish(Columns([untouched, None]), CONTEXT).values == [untouched, None]
    null: Any = make_redact({"fields": ["$.*"], "replacement": None})
    assert null.on_publish(Columns([b'{"a":1,"b":[2]}']), CONTEXT).values == [b'{"a":null,"b":null}']


def test_redact_does_not_store_what_it_cannot_read() -> None:
    redact: Any = make_redact({"fields": ["$.card"]})
    assert reasons_of(redact.on_publish(Columns([b"card 4111", b"{}"]), CONTEXT)) == {0: "the value is not JSON"}


def test_redact_keeps_hidden_what_repeats() -> None:
    redact: Any = make_redact({"fields": ["$.a"], "headers": ["t"]})
    twice = RepeatedHeaders(["t", "u", "t"], [b"1", b"2", b"3"])
    made = redact.on_publish(Columns([b'{"a":1,"a":2}'], headers=[twice]), CONTEXT)
    assert made.values == [b'{"a":"***"}']
    assert made.headers[0].pairs() == [("t", b"***"), ("u", b"2"), ("t", b"***")]


REPEATED = [
    ("$.a.card", b'{"a":{"card":"SECRET"},"a":1}', b'{"a":1}'),
    ("$.p[*].name", b'{"p":[{"name":"SECRET"}], "p":[]}', b'{"p":[]}'),
    ("$.a.card", b'{"a":{"card":"SECRET"},"\\u0061":[1.50]}', b'{"a":[1.5]}'),
    ("$[*].a.card", b'[{"a":{"card":"SECRET"},"a":1}]', b'[{"a":1}]'),
]


@pytest.mark.parametrize(("path", "value", "left"), REPEATED)
def test_repeated_names_do_not_get_past_redaction(path: str, value: bytes, left: bytes) -> None:
    at_publish: Any = make_redact({"fields": [path]})
    at_delivery: Any = make_redact({"fields": [path], "when": "deliver"})
    assert at_publish.on_publish(Columns([value]), CONTEXT).values == [left]
    assert at_delivery.on_deliver(Columns([value]), CONTEXT).values == [left]


@pytest.mark.parametrize("path", ["card", "$", "$.", "$..a", "$.a[", "$.a[-1]", "$[?@.a]", 3, "$" + ".a" * 40])
def test_redact_refuses_other_paths(path: Any) -> None:
    with pytest.raises(InvalidArgument, match="is no path"):
        parse_path(path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give the option"),
        ({"fields": ["$.a"], "when": "later"}, "publish, deliver"),
        ({"fields": "$.a"}, "must be a list"),
        ({"fields": ["$.a"], "when": "deliver", "on_invalid": "refuse"}, "messages that are published"),
        ({"headers": [1]}, "list of names"),
        ({"fields": ["$.a"] * 101}, "at most 100"),
    ],
)
def test_redact_refuses_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        make_redact(options)


# transform

NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_json_survives_messagepack(content: Any) -> None:
    value = msgspec.json.encode(content)
    packed, headers = json_to_msgpack(value, {"own": b"1"})
    assert headers == {"own": b"1", "content-type": b"application/msgpack"}
    back, headers = msgpack_to_json(packed, headers)
    assert headers == {"own": b"1", "content-type": b"application/json"}
    assert msgspec.json.decode(back or b"") == content


ATTRIBUTE = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cn"]), min_size=1)
NAMES = st.from_regex(r"[a-z0-9]{1,20}", fullmatch=True).filter(
    lambda name: name not in ("data", "datacontenttype", "specversion", "id", "source", "type", "time")
)
EVENTS = st.fixed_dictionaries(
    {"specversion": st.just("1.0"), "id": ATTRIBUTE, "source": ATTRIBUTE, "type": ATTRIBUTE},
    optional={"subject": ATTRIBUTE, "time": st.just("2026-11-18T02:00:00Z")},
)
DATA = st.one_of(
    st.just({}),
    st.builds(lambda content: {"data": content}, JSON),
    st.builds(lambda content: {"data": content, "datacontenttype": "application/vnd.x+json; v=1"}, JSON),
    st.builds(lambda text: {"data": text, "datacontenttype": "text/plain"}, st.text()),
    st.builds(
        lambda raw: {"data_base64": msgspec.json.decode(msgspec.json.encode(raw)), "datacontenttype": "image/png"},
        st.binary(),
    ),
)


@given(EVENTS, st.dictionaries(NAMES, ATTRIBUTE | st.booleans() | st.integers(-5, 5), max_size=3), DATA)
def test_cloud_events_survive_both_modes(attributes: Any, extensions: Any, data: Any) -> None:
    event = {**extensions, **attributes, **data}
    value, headers = to_binary(msgspec.json.encode(event), {"own": b"1"})
    assert headers["own"] == b"1"
    assert headers["ce_id"] == attributes["id"].encode()
    back, headers = to_structured(value, headers)
    told = {"datacontenttype": "application/json"} if "data" in event else {}  # the default of the JSON format
    assert msgspec.json.decode(back) == {**told, **event}
    assert headers == {"own": b"1", "content-type": b"application/cloudevents+json; charset=utf-8"}
    again, _ = to_binary(back, headers)
    assert again == value


def test_cloud_events_in_binary_mode_are_as_in_the_kafka_binding() -> None:
    event = {"specversion": "1.0", "id": "7", "source": "/till", "type": "sold", "n": 3, "ok": True,
             "datacontenttype": "application/json", "data": {"a": 1}}  # fmt: skip
    value, headers = to_binary(json.dumps(event).encode(), {"ce_old": b"1", "Content-Type": b"x"})
    assert value == b'{"a": 1}'
    assert headers == {
        "ce_specversion": b"1.0", "ce_id": b"7", "ce_source": b"/till", "ce_type": b"sold", "ce_n": b"3",
        "ce_ok": b"true", "content-type": b"application/json", "cloudevents-types": b"n=integer,ok=boolean",
    }  # fmt: skip


def test_an_event_in_binary_mode_stays_so() -> None:
    headers = {"ce_specversion": b"1.0", "ce_id": b"7", "ce_source": b"/a", "ce_type": b"t", "content-type": b"a/b"}
    assert to_binary(b"{}", headers) == (b"{}", headers)
    with pytest.raises(InvalidEvent):
        to_binary(b"{}", {"ce_specversion": b"1.0"})


@pytest.mark.parametrize(
    "value",
    [
        None, b"", b"[]", b"{", b"{}", b'{"specversion":"0.3","id":"1","source":"a","type":"b"}',
        b'{"specversion":"1.0","id":"","source":"a","type":"b"}',
        b'{"specversion":"1.0","id":"1","source":"a","type":"b","Upper":"x"}',
        b'{"specversion":"1.0","id":"1","source":"a","type":"b","x":{}}',
        b'{"specversion":"1.0","id":"1","source":"a","type":"b","x":1.5}',
        b'{"specversion":"1.0","id":"1","source":"a","type":"b","data":1,"data_base64":""}',
        b'{"specversion":"1.0","id":"1","source":"a","type":"b","data_base64":"?"}',
        b'{"specversion":"1.0","id":"1","source":"a","type":"b","datacontenttype":"text/plain","data":1}',
    ],
)  # fmt: skip
def test_what_is_no_cloud_event_is_refused(value: bytes | None) -> None:
    with pytest.raises(InvalidEvent):
        to_binary(value, None)


@pytest.mark.parametrize("headers", [None, {}, {"ce_id": b"1"}, {"ce_specversion": b"1.0", "ce_id": b"\xff"}])
def test_a_binary_event_needs_its_attributes(headers: Any) -> None:
    with pytest.raises(InvalidEvent):
        to_structured(b"1", headers)


def test_transform_refuses_or_buries_what_it_cannot_transform() -> None:
    transform: Any = make_transform({"from": "json", "to": "msgpack", "on_invalid": "dead_letter"})
    outcome = transform.on_publish(Columns([b"{}", b"{", str(1 << 70).encode()]), CONTEXT)
    assert isinstance(outcome, RefusedMessages)
    assert outcome.dead_letter
    assert 1 in outcome.reasons
    assert 0 not in outcome.reasons
    bench = Workbench()
    entry = {"name": "transform", "from": "cloudevents-structured", "to": "cloudevents-binary"}
    bench.ask(TopicCreate("events", {"middleware": [entry]}))
    with pytest.raises(MessageRefused, match="specversion is missing"):
        bench.publish("events", [b'{"id":"1"}'])


def test_reasons_are_in_plain_words() -> None:
    unreadable = [b"1e999", b'"\\ud800"', b"9" * 5000, b'{"a":"\\udc00 "}']
    told = "the value has a number or a character that cannot be represented"
    schema = SchemaMiddleware({"schema": True})
    assert set(reasons_of(schema.on_publish(Columns(unreadable), CONTEXT)).values()) == {told}
    none = [b"{", b"[NaN]", b"\xff", b"[" * 100_000 + b"]" * 100_000]
    reasons = ["the value is not JSON"] * 3 + ["the value is nested too deeply"]
    assert list(reasons_of(schema.on_publish(Columns(none), CONTEXT)).values()) == reasons
    to_msgpack: Any = make_transform({"from": "json", "to": "msgpack"})
    other = "the value has something that the other format cannot represent"
    assert reasons_of(to_msgpack.on_publish(Columns([str(1 << 70).encode()]), CONTEXT)) == {0: other}
    to_json: Any = make_transform({"from": "msgpack", "to": "json"})
    packed = [b"\xc1", b"\x91" * 5000, msgspec.msgpack.encode({None: 1})]
    wanted = ["the value is not MessagePack", "the value is nested too deeply", other]
    assert list(reasons_of(to_json.on_publish(Columns(packed), CONTEXT)).values()) == wanted


# split and combine


def test_split_makes_a_message_of_each_element() -> None:
    columns = Columns([b'[1, {"a":2}]', b"[3]"], keys=[b"k", b"l"], headers=[{"h": b"1"}, None], dues=[5, None])
    made = SplitMiddleware({}).on_publish(columns, CONTEXT)
    assert values_of(made) == [b"1", b'{"a":2}', b"3"]
    assert isinstance(made, Columns)
    assert (made.keys, made.headers) == ([b"k", b"k", b"l"], [{"h": b"1"}, {"h": b"1"}, None])
    assert made.dues == [5, 5, None]
    lines = SplitMiddleware({"format": "ndjson"}).on_publish(Columns([b'{"a":1}\r\n\n2\n']), CONTEXT)
    assert values_of(lines) == [b'{"a":1}', b"2"]


def test_split_keeps_what_it_cannot_split_apart() -> None:
    made = SplitMiddleware({"on_invalid": "dead_letter"}).on_publish(Columns([b"[1,2]", b"{}", b"[]", b"[3]"]), CONTEXT)
    assert isinstance(made, RefusedMessages)
    assert made.columns is not None
    assert made.columns.values == [b"1", b"2", b"{}", b"[]", b"3"]
    assert sorted(made.reasons) == [2, 3]
    many = SplitMiddleware({}).on_publish(Columns([msgspec.json.encode(list(range(70_000)))]), CONTEXT)
    assert "more than 65536" in reasons_of(many)[0]


def test_combine_makes_an_array_of_each_key() -> None:
    columns = Columns([b"1", b"2", b"3", b"4"], keys=[b"a", b"b", b"a", None], timestamps=[5, 6, 7, 8])
    made = CombineMiddleware({}).on_publish(columns, CONTEXT)
    assert values_of(made) == [b"[1,3]", b"[2]", b"[4]"]
    assert isinstance(made, Columns)
    assert (made.keys, made.timestamps) == ([b"a", b"b", None], [5, 6, 8])
    wrong = CombineMiddleware({"on_invalid": "dead_letter"}).on_publish(Columns([b"1", b"x", None, b"2"]), CONTEXT)
    assert isinstance(wrong, RefusedMessages)
    assert wrong.columns is not None
    assert wrong.columns.values == [b"[1,2]", b"x", None]
    assert sorted(wrong.reasons) == [1, 2]


def test_split_undoes_combine_in_a_topic() -> None:
    bench = Workbench()
    entries = [{"name": "combine"}, {"name": "split", "on_invalid": "dead_letter"}]
    bench.ask(TopicCreate("orders", {"middleware": entries}))
    published = bench.publish("orders", [b"1", b"2", b"3"])
    assert (published.base_offset, published.stored) == (0, 3)
    assert bench.values("orders") == [b"1", b"2", b"3"]


def test_dead_letters_of_split_leave_gaps() -> None:
    bench = Workbench()
    entry = {"name": "split", "on_invalid": "dead_letter"}
    bench.ask(TopicCreate("orders", {"middleware": [entry]}))
    published = bench.publish("orders", [b"[1,2]", b"{}", b"[3]"])
    assert (published.base_offset, published.stored) == (0, 3)
    messages = [(one.offset, one.value) for batch in bench.batches("orders") for one in batch.messages()]
    assert messages == [(0, b"1"), (1, b"2"), (3, b"3")]
    assert bench.values("orders.dead") == [b"{}"]


def test_dead_letters_do_not_count_as_stored_and_name_the_message_that_was_sent() -> None:
    bench = Workbench()
    entries: list[dict[str, Any]] = [{"name": "split"}, {"name": "schema", "schema": {"type": "integer"}}]
    entries = [{**entry, "on_invalid": "dead_letter"} for entry in entries]
    bench.ask(TopicCreate("orders", {"middleware": entries}))
    stamp = Producer(99, 0, 0)
    batch = [b'[1,"x",2]', b"nope", b"[3]"]
    assert bench.publish("orders", batch, producer=stamp).stored == 3
    again = bench.publish("orders", batch, producer=stamp)
    assert (again.duplicate, again.stored) == (True, 3)
    assert bench.values("orders") == [b"1", b"2", b"3"]
    letters = [one for found in bench.batches("orders.dead") for one in found.messages()]
    found = {one.value: (one.headers or {})["headrace-dead-index"] for one in letters}
    assert found == {b"nope": b"1", b'"x"': b"1"}  # the first as sent, the second among those that split made
    assert bench.publish("orders", [b'["y"]']).stored == 0


def test_a_refused_batch_names_the_message_that_was_sent() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("orders", {"middleware": [{"name": "split"}]}))
    with pytest.raises(MessageRefused, match="refuses message 1 of the batch"):
        bench.publish("orders", [b"[1,2,3]", b"nope"])
    combine = CombineMiddleware({})
    outcome = combine.on_publish(Columns([b"1", b"2", b"{"], keys=[b"k", b"k", b"k"]), CONTEXT)
    assert isinstance(outcome, RefusedMessages)
    assert (list(outcome.reasons), outcome.sources) == ([1], {1: 2})
