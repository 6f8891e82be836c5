"""What the types of single fields cannot say of a body: which fields exclude each other, and how texts must look."""

from typing import Any

import msgspec

from headrace.gateways.http.event_position import POSITION_PATTERN
from headrace.gateways.http.job_resources import ResultFields
from headrace.gateways.http.route_resources import ExplainFields
from headrace.gateways.http.timeline_resources import SelectionFields
from headrace.gateways.http.topic_resources import GroupCommit
from headrace.model.content.query import KINDS, ContentQuery
from headrace.model.envelope import MessageEnvelope
from headrace.model.job_requests import JOB_ID_PATTERN
from headrace.model.requests import TopicTrim
from headrace.model.route import CONDITIONS
from headrace.model.route_requests import RouteDefinition

Schema = dict[str, Any]
MESSAGE_ID_PATTERN = r"^[0-9]{1,4}:[0-9]{1,18}$"
"""A message by partition and offset."""


def _given(name: str, *, unless: Any = None) -> Schema:
    """That a field is there and is not what stands for none."""
    return {"required": [name], "properties": {name: {"not": {"const": unless}}}}


def _present(name: str) -> Schema:
    return {"required": [name]}


def _not_both(one: Schema, other: Schema) -> Schema:
    return {"not": {"allOf": [one, other]}}


_ONE_VALUE: Schema = {"oneOf": [_present("value"), _given("value_base64")]}
_ONE_KEY = _not_both(_given("key"), _given("key_base64"))
_TOPIC, _POSITION, _OFFSETS = (_given("topic", unless=""), _given("position", unless=""), _given("offsets", unless=[]))
_FLAGS = ("all", "unmatched")
_CONSTRAINTS: dict[type[msgspec.Struct], Schema] = {
    MessageEnvelope: {"allOf": [_ONE_VALUE, _ONE_KEY]},
    ExplainFields: {"allOf": [_not_both(_present("value"), _given("value_base64")), _ONE_KEY]},
    ResultFields: {"oneOf": [_present("value"), _given("value_base64"), _given("error")]},
    ContentQuery: {"oneOf": [_present(kind) for kind in KINDS]},
    RouteDefinition: {
        "oneOf": [_given(name, unless=False if name in _FLAGS else None) for name in CONDITIONS],
        "properties": {"targets": {"minItems": 1}},
    },
    GroupCommit: {
        "oneOf": [
            {"allOf": [_TOPIC, _POSITION], "not": _OFFSETS},
            {"allOf": [_OFFSETS], "not": {"anyOf": [_TOPIC, _POSITION]}},
        ],
        "properties": {"position": {"pattern": f"^$|{POSITION_PATTERN}"}},
    },
    TopicTrim: {"properties": {"offsets": {"propertyNames": {"pattern": "^[0-9]{1,4}$"}}}},
    SelectionFields: {"properties": {"messages": {"items": {"type": "string", "pattern": MESSAGE_ID_PATTERN}}}},
}  # fmt: skip


def constrain(schema: Schema, kind: type[msgspec.Struct]) -> None:
    """Add to the schema of a struct what its fields together must be; `kind` may be made of another struct."""
    for base in getattr(kind, "source_struct", kind).__mro__:
        for name, constraint in _CONSTRAINTS.get(base, {}).items():
            if name == "properties":
                for field, more in constraint.items():
                    schema["properties"][field].update(more)
            else:
                schema[name] = constraint


PLAIN_NAMED = ("/v1/webhooks/",)
"""Where paths begin whose `name` is a plain one: of letters, digits, `.`, `_` and `-`."""
PATH_PATTERNS = {"id": MESSAGE_ID_PATTERN, "job": JOB_ID_PATTERN}
"""How parameters of paths look that are no names."""
