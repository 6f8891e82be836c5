"""The middleware `uppercase`: stores values in capital letters."""

from collections.abc import Mapping
from typing import Any

from headrace.model.batch import Columns
from headrace.model.middleware import Middleware, MiddlewareContext, check_options


class UppercaseMiddleware(Middleware):
    """Changes ASCII letters of values at publish; with the option `keys`, those of keys too."""

    inline = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        check_options(options, {"keys": bool})
        self.needs = ("values", "keys") if options.get("keys") else ("values",)

    def on_publish(self, columns: Columns, context: MiddlewareContext) -> Columns:  # noqa: ARG002
        """The messages as they are stored."""
        columns.values = [None if value is None else bytes(value).upper() for value in columns.values]
        if "keys" in self.needs and columns.keys is not None:
            columns.keys = [None if key is None else bytes(key).upper() for key in columns.keys]
        return columns
