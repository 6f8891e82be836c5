"""The middleware `schema`: messages must be JSON that a JSON Schema allows."""

from collections.abc import Mapping
from typing import Any

from headrace.middleware.json_values import NotJson, decode_json, encode_json, on_invalid, outcome_of
from headrace.middleware.schema_cost import schema_cost
from headrace.model.arguments import shortened
from headrace.model.batch import Columns
from headrace.model.errors import InvalidArgument
from headrace.model.middleware import Middleware, MiddlewareContext, RefusedMessages, check_options

_WORK_MAX = 16 << 20
"""The cost of a schema times the bytes of a value, at most: about a tenth of a second of validation."""
_REGEX_BYTES = 1 << 20
_PATH_CHARS_MAX = 200


class SchemaMiddleware(Middleware):
    """Validates values with a schema; patterns run in an engine without backtracking, references stay inside."""

    needs = ("values",)
    inline = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        check_options(options, {"schema": (dict, bool), "on_invalid": str})
        if "schema" not in options:
            raise InvalidArgument("give the option 'schema', a JSON Schema")
        self._dead_letter = on_invalid(options)
        self._value_bytes_max = _WORK_MAX // schema_cost(options["schema"])
        self._validator = _make_validator(options["schema"])

    def on_publish(self, columns: Columns, _: MiddlewareContext) -> Columns | RefusedMessages:
        """Refuse the messages that are not valid."""
        reasons: dict[int, str] = {}
        is_valid = self._validator.is_valid
        for index, value in enumerate(columns.values):
            try:
                if value is not None and len(value) > self._value_bytes_max:
                    raise NotJson(
                        f"the schema is too complicated for values of more than {self._value_bytes_max} bytes"
                    )
                content = decode_json(value)
            except NotJson as error:
                reasons[index] = str(error)
                continue
            try:
                if not is_valid(content):
                    reasons[index] = self._reason(content)
            except ValueError:
                reasons[index] = "the value is nested too deeply"
        return outcome_of(columns, reasons, dead_letter=self._dead_letter)

    def _reason(self, content: Any) -> str:
        """What is wrong with a value: where and by which keyword, but not the content."""
        error = next(iter(self._validator.iter_errors(content)), None)
        if error is None:
            return "the schema does not allow the value"
        where = "".join(f"/{step}" for step in error.instance_path)[:_PATH_CHARS_MAX]
        return f"the schema does not allow the value at {where or 'its root'}: {error.kind.name}"


def _make_validator(schema: Any) -> Any:
    try:
        import jsonschema_rs
    except ImportError as error:
        raise InvalidArgument("JSON Schema needs the extra [content]: pip install 'headrace[content]'") from error
    linear = jsonschema_rs.RegexOptions(size_limit=_REGEX_BYTES, dfa_size_limit=_REGEX_BYTES)
    try:
        encode_json(schema)
        return jsonschema_rs.validator_for(schema, pattern_options=linear, offline=True)
    except (ValueError, TypeError, jsonschema_rs.ReferencingError) as error:
        raise InvalidArgument(f"this is no valid JSON Schema: {shortened(error)}") from error
