"""The middleware `schema`: messages must be JSON that a JSON Schema allows."""

import re
from collections.abc import Mapping
from typing import Any

from headrace.middleware.json_values import NotJson, decode_json, encode_json, on_invalid, outcome_of
from headrace.middleware.schema_cost import schema_cost
from headrace.model.arguments import shortened
from headrace.model.batch import Columns
from headrace.model.errors import InvalidArgument
from headrace.model.limits import INLINE_BYTES_MAX
from headrace.model.middleware import Middleware, MiddlewareContext, RefusedMessages, check_options

_WORK_MAX = 4 << 20
"""The cost of a schema times the bytes of a value, at most."""
_PATTERN_WORK_MAX = 1 << 17
"""The width of the patterns of a schema times the bytes of a value, at most: each takes up to 50 nanoseconds."""
_MULTIPLE_WIDTH = 200
"""What `multipleOf` counts as, if the value may have numbers for which it takes long."""
_LONG_NUMBER = re.compile(rb"[0-9]{25}|[0-9][eE][+-]?[0-9]{2}")
_ERRORS_MAX = 1 << 14
"""So many errors about a value may be made to tell one of them."""
_REGEX_BYTES = 1 << 20
_REGEX_BYTES_MIN = 1 << 10
_PATH_CHARS_MAX = 200


class SchemaMiddleware(Middleware):
    """Validates values with a schema; patterns run in an engine without backtracking, references stay inside."""

    needs = ("values",)

    def __init__(self, options: Mapping[str, Any]) -> None:
        check_options(options, {"schema": (dict, bool), "on_invalid": str})
        if "schema" not in options:
            raise InvalidArgument("give the option 'schema', a JSON Schema")
        self._dead_letter = on_invalid(options)
        found = schema_cost(options["schema"], _measure_pattern)
        self._errors = found.errors
        self._has_multiples = found.has_multiples
        self._value_bytes_max = _WORK_MAX // found.cost
        if found.width:
            self._value_bytes_max = min(self._value_bytes_max, _PATTERN_WORK_MAX // found.width)
        is_light = found.cost * INLINE_BYTES_MAX <= _WORK_MAX
        is_narrow = found.width * INLINE_BYTES_MAX <= 2 * _PATTERN_WORK_MAX
        self.inline = is_light and is_narrow and not found.has_multiples  # a whole batch takes as long then, at most
        self._validator = _make_validator(options["schema"])

    def on_publish(self, columns: Columns, _: MiddlewareContext) -> Columns | RefusedMessages:
        """Refuse the messages that are not valid."""
        reasons: dict[int, str] = {}
        is_valid = self._validator.is_valid
        for index, value in enumerate(columns.values):
            try:
                if value is not None:
                    self._check_size(value)
                content = decode_json(value)
            except NotJson as error:
                reasons[index] = str(error)
                continue
            try:
                if not is_valid(content):
                    reasons[index] = self._reason(value, content)
            except ValueError:
                reasons[index] = "the value is nested too deeply"
        return outcome_of(columns, reasons, dead_letter=self._dead_letter)

    def _check_size(self, value: bytes) -> None:
        """Refuse a value that could take too long to validate."""
        most = self._value_bytes_max
        if len(value) > most:
            raise NotJson(f"the value is too large to validate: with this schema, {most} bytes are the most")
        if self._has_multiples and len(value) > _PATTERN_WORK_MAX // _MULTIPLE_WIDTH and _LONG_NUMBER.search(value):
            raise NotJson("the value is too large to validate multipleOf for numbers of so many digits")

    def _reason(self, value: bytes | None, content: Any) -> str:
        """What is wrong with a value: where and by which keyword, but not the content."""
        from jsonschema_rs import ValidationError

        told = "the schema does not allow the value"
        if self._errors * len(value or b"") > _ERRORS_MAX:
            return told
        try:
            self._validator.validate(content)
        except ValidationError as error:
            where = "".join(f"/{step}" for step in error.instance_path)[:_PATH_CHARS_MAX]
            return f"{told} at {where or 'its root'}: {error.kind.name}"
        return told


def _measure_pattern(pattern: str) -> int:
    """How many bytes a pattern has when it is compiled, at most a half too many; raises if it cannot be."""
    regex_bytes = _REGEX_BYTES_MIN
    while regex_bytes < _REGEX_BYTES:
        try:
            _make_validator({"pattern": pattern}, regex_bytes)
        except InvalidArgument:
            regex_bytes += regex_bytes // 2
        else:
            return regex_bytes
    _make_validator({"pattern": pattern})
    return _REGEX_BYTES


def _make_validator(schema: Any, regex_bytes: int = _REGEX_BYTES) -> Any:
    try:
        import jsonschema_rs
    except ImportError as error:
        raise InvalidArgument("JSON Schema needs the extra [content]: pip install 'headrace[content]'") from error
    linear = jsonschema_rs.RegexOptions(size_limit=regex_bytes, dfa_size_limit=_REGEX_BYTES)
    try:
        encode_json(schema)
        return jsonschema_rs.validator_for(schema, pattern_options=linear, offline=True)
    except (ValueError, TypeError, jsonschema_rs.ReferencingError) as error:
        raise InvalidArgument(f"this is no valid JSON Schema: {shortened(error)}") from error
