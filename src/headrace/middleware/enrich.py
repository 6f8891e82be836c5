"""The middleware `enrich`: headers that say who published a message, when and from where."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headrace.model.batch import Columns
from headrace.model.errors import InvalidArgument
from headrace.model.headers import replaced_headers
from headrace.model.middleware import Middleware, MiddlewareContext, check_options

_FIELDS: dict[str, Callable[[MiddlewareContext], str]] = {
    "client": lambda context: context.client,
    "identity": lambda context: context.identity,
    "address": lambda context: context.address,
    "gateway": lambda context: context.gateway,
    "time": lambda context: str(context.time_us),
}
_PREFIX_CHARS_MAX = 100


class EnrichMiddleware(Middleware):
    """Adds headers with what the broker knows; a producer's own headers of these names are replaced."""

    needs = ("headers",)
    inline = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        check_options(options, {"fields": list, "prefix": str})
        self._fields: list[str] = options.get("fields", list(_FIELDS))
        self._prefix: str = options.get("prefix", "headrace-")
        if not self._fields or any(field not in _FIELDS for field in self._fields):
            raise InvalidArgument(f"the option 'fields' is a list of {', '.join(_FIELDS)}, not {self._fields}")
        if len(self._prefix) > _PREFIX_CHARS_MAX:
            raise InvalidArgument(f"the option 'prefix' has at most {_PREFIX_CHARS_MAX} characters")

    def on_publish(self, columns: Columns, context: MiddlewareContext) -> Columns:
        """Add the headers, also those of which nothing is known: else a producer could add them itself."""
        told = {f"{self._prefix}{field}": _FIELDS[field](context).encode() for field in self._fields}
        given = columns.headers
        if given is None:
            headers: list[Any] = [told] * len(columns.values)
        else:
            headers = [replaced_headers(each, told) if each else told for each in given]
        return msgspec.structs.replace(columns, headers=headers)
