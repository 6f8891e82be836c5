"""A middleware that does not return before it is told to, for tests with real threads."""

import threading
from collections.abc import Mapping
from typing import Any

from headrace.middleware import Columns, Middleware, MiddlewareContext

go_on = threading.Event()
entered = threading.Event()


class Blocking(Middleware):
    """Waits."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        pass

    def on_publish(self, columns: Columns, _: MiddlewareContext) -> Columns:
        entered.set()
        assert go_on.wait(60)
        return columns
