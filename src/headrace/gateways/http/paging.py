"""Lists in pages: a cursor tells where the last page ended."""

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec

PAGE_MAX = 1000
T = TypeVar("T")

PageLimit = Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)]


class PageQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which page of a list."""

    limit: PageLimit = 100
    """How many at most."""
    after: str = ""
    """What `next` of the page before said."""


def page(items: Sequence[T], name: Callable[[T], str], query: PageQuery) -> tuple[list[T], str]:
    """The items of a page, in the order of their names, and the cursor of the next one; empty at the end."""
    following = sorted((item for item in items if name(item) > query.after), key=name)
    found = following[: query.limit]
    return found, name(found[-1]) if len(following) > len(found) else ""
