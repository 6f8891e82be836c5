"""What the client checks of routes before it asks the broker."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.model.arguments import shortened, shown
from headrace.model.content.query import KINDS, ContentQuery
from headrace.model.errors import InvalidArgument, InvalidContentQuery


def given_query(content: Mapping[str, Any] | ContentQuery) -> ContentQuery:
    """The content query that a mapping of one kind to its argument stands for.

    >>> given_query({"regex": "^ERROR"}).kind
    'regex'
    """
    if isinstance(content, ContentQuery):
        return content
    if not isinstance(content, Mapping):
        raise InvalidArgument(
            f"content is a mapping of one of {', '.join(KINDS)} to what it asks for, not {shown(content)}"
        )
    try:
        return msgspec.convert(dict(content), ContentQuery)
    except (msgspec.ValidationError, TypeError) as error:
        if isinstance(error.__cause__, InvalidContentQuery):
            raise error.__cause__ from error
        raise InvalidContentQuery(f"the content query cannot be used: {shortened(error)}") from error
