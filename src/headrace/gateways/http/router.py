"""Finds the route of a path: one look into a dictionary for each part of it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import unquote

from headrace.gateways.http.call import INVALID_ESCAPE
from headrace.gateways.http.problems import HttpError

if TYPE_CHECKING:
    from headrace.gateways.http.route import Route


class _Node:
    """What can follow a part of a path."""

    __slots__ = ("any", "methods", "named")

    def __init__(self) -> None:
        self.named: dict[str, _Node] = {}
        self.any: _Node | None = None
        """For a parameter, whatever it is."""
        self.methods: dict[str, Route] = {}


class Router:
    """The routes, by the parts of their paths and by method."""

    def __init__(self, routes: "Iterable[Route]") -> None:
        self._root = _Node()
        for route in routes:
            node = self._root
            for part in route.path.split("/")[1:]:
                if part.startswith("{"):
                    node.any = node.any or _Node()
                    node = node.any
                else:
                    node = node.named.setdefault(part, _Node())
            assert route.method not in node.methods, f"two routes {route.method} {route.path}"
            node.methods[route.method] = route

    def find(self, raw_path: bytes, method: str) -> "tuple[Route, list[str]]":
        """The route of a path as it was sent, and its parameters."""
        methods, parameters = self.methods(raw_path)
        route = methods.get(method)
        if route is None:
            allowed = ", ".join(sorted(methods)).encode()
            raise HttpError("method_not_allowed", headers=((b"allow", allowed),))
        return route, parameters

    def methods(self, raw_path: bytes) -> "tuple[dict[str, Route], list[str]]":
        """All routes of a path by method, and its parameters; names in it may have any character as %XX."""
        node, parameters = self._root, []
        quoted = b"%" in raw_path
        if quoted and INVALID_ESCAPE.search(raw_path):
            raise HttpError("invalid_encoding", "the path has a % without two hexadecimal digits; write %25 for it")
        try:
            for part in raw_path.decode("ascii").split("/")[1:]:
                following = node.named.get(part)
                if following is None:
                    following = node.any
                    if following is None or not part:
                        raise HttpError("path_not_found")
                    parameters.append(unquote(part, errors="strict") if quoted else part)
                node = following
        except UnicodeDecodeError as error:
            raise HttpError("invalid_encoding", "the path is no UTF-8 with %XX for other characters") from error
        if not node.methods:
            raise HttpError("path_not_found")
        return node.methods, parameters
