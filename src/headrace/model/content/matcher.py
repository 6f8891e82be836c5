"""The matcher: a compiled content query, which selects messages of a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.model.content.budget import Evaluation, OverBudget
from headrace.model.content.decoded_values import NOT_JSON, DecodedValues
from headrace.model.content.json_values import count_nodes, is_contained, is_equal
from headrace.model.content.jsonpath_filters import compile_jsonpath
from headrace.model.content.jsonpath_nodes import NOTHING, Test
from headrace.model.content.jsonpath_parser import parse_jsonpath
from headrace.model.content.query import ContentQuery
from headrace.model.content.regular_expression import RegularExpression
from headrace.model.limits import CONTENT_STEPS_MAX


class Selection(NamedTuple):
    """Which messages of a batch a query selects, by their indexes in order."""

    matched: list[int]
    failed: list[int]
    """Messages for which the query took too many steps, or whose value cannot be decoded although it may be JSON."""
    end: int
    """The index of the first message that was not looked at: the count, unless the work was limited."""
    steps: int = 0
    """How many steps that took, where they are counted."""


class QueryMatcher:
    """A compiled content query."""

    def __init__(self, query: ContentQuery) -> None:
        self.query = query

    def select(
        self,
        decoded: DecodedValues,
        start: int = 0,
        steps_max: int | None = None,
        *,
        stop: int | None = None,
        budgets: list[int] | None = None,
    ) -> Selection:
        """Look at the messages from index `start` on and before `stop`.

        With `steps_max` it ends after the message that uses up so many steps; `Selection.end` says where. `budgets` are
        the steps that several queries may take together, for each message; they are reduced by what this one takes.
        """
        raise NotImplementedError


class _ConstantMatcher(QueryMatcher):
    """A query on documents that takes the same few steps for each, whatever the document: no budget is needed."""

    def __init__(self, query: ContentQuery, test: Callable[[Any], bool]) -> None:
        super().__init__(query)
        self._test = test
        self._steps = 1 + count_nodes(query.argument) // 2

    def select(
        self,
        decoded: DecodedValues,
        start: int = 0,
        steps_max: int | None = None,
        *,
        stop: int | None = None,
        budgets: list[int] | None = None,  # noqa: ARG002
    ) -> Selection:
        end = len(decoded) if stop is None else stop
        if steps_max is not None:
            end = min(end, start + max(steps_max // self._steps, 1))
        documents, test = decoded.documents(end), self._test
        window = documents[start:end] if start or end < len(documents) else documents
        matched = [index for index, document in enumerate(window, start) if document is not NOT_JSON and test(document)]
        return Selection(matched, _between(decoded.failed, start, end), end, (end - start) * self._steps)


class _PathMatcher(QueryMatcher):
    """A JSONPath that may visit many nodes."""

    def __init__(self, query: ContentQuery, exists: Test) -> None:
        super().__init__(query)
        self._exists = exists

    def select(
        self,
        decoded: DecodedValues,
        start: int = 0,
        steps_max: int | None = None,
        *,
        stop: int | None = None,
        budgets: list[int] | None = None,
    ) -> Selection:
        count = len(decoded) if stop is None else stop
        left = 1 << 60 if steps_max is None else steps_max
        documents = decoded.documents(count if steps_max is None else start)
        matched: list[int] = []
        failed: list[int] = []
        exists, evaluation, index = self._exists, Evaluation(None), start
        while index < count and left > 0:
            if index >= len(documents):
                documents = decoded.documents(min(index + 64, count))
            document = documents[index]
            if document is not NOT_JSON:
                allowed = CONTENT_STEPS_MAX if budgets is None else min(CONTENT_STEPS_MAX, budgets[index])
                evaluation.root, evaluation.left = document, allowed
                try:
                    evaluation.spend(1)
                    if exists(document, evaluation):
                        matched.append(index)
                except OverBudget:
                    failed.append(index)
                used = allowed - max(evaluation.left, 0)
                left -= used
                if budgets is not None:
                    budgets[index] -= used
            else:
                left -= 1
            index += 1
        undecoded = _between(decoded.failed, start, index)
        steps = (1 << 60 if steps_max is None else steps_max) - left
        return Selection(matched, sorted([*failed, *undecoded]) if undecoded else failed, index, steps)


class _BytesMatcher(QueryMatcher):
    """A regular expression on the bytes of values."""

    def __init__(self, query: ContentQuery, expression: RegularExpression) -> None:
        super().__init__(query)
        self._search = expression.search
        self._bytes_max = expression.bytes_max

    def select(
        self,
        decoded: DecodedValues,
        start: int = 0,
        steps_max: int | None = None,
        *,
        stop: int | None = None,
        budgets: list[int] | None = None,
    ) -> Selection:
        matched: list[int] = []
        failed: list[int] = []
        search, bytes_max = self._search, self._bytes_max
        allowed = left = 1 << 60 if steps_max is None else max(1, steps_max * bytes_max // CONTENT_STEPS_MAX)
        end = len(decoded) if stop is None else stop
        for index, value in enumerate(decoded.values[start:end], start):
            if left <= 0:
                end = index
                break
            if value is not None:
                if len(value) > bytes_max:
                    failed.append(index)
                    continue
                if budgets is not None:
                    steps = 1 + len(value) * CONTENT_STEPS_MAX // bytes_max
                    if steps > budgets[index]:
                        failed.append(index)
                        continue
                    budgets[index] -= steps
                left -= len(value) + 1
                if search(value) is not None:
                    matched.append(index)
        return Selection(matched, failed, end, (allowed - left) * CONTENT_STEPS_MAX // bytes_max)


def compile_query(query: ContentQuery) -> QueryMatcher:
    """Compile a query; raises InvalidContentQuery, or ContentSupportMissing if a package is not installed.

    >>> matcher = compile_query(ContentQuery(jsonpath="$.items[?@.price > 10]"))
    >>> matcher.select(DecodedValues([b'{"items": [{"price": 12}]}', b'{"items": []}', b"no JSON"])).matched
    [0]
    """
    argument = query.argument
    if query.kind == "exact":
        return _ConstantMatcher(query, lambda document: document == argument and is_equal(argument, document))
    if query.kind == "partial":
        return _ConstantMatcher(query, lambda document: is_contained(argument, document))
    if query.kind == "regex":
        return _BytesMatcher(query, RegularExpression(argument))
    path = compile_jsonpath(parse_jsonpath(argument))
    if (lookup := path.lookup) is not None:
        return _ConstantMatcher(query, lambda document: lookup(document) is not NOTHING)
    return _PathMatcher(query, path.exists)


def _between(indexes: list[int], start: int, end: int) -> list[int]:
    return [index for index in indexes if start <= index < end] if indexes else []
