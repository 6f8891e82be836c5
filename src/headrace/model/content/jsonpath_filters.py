"""The filter expressions of JSONPath, as functions from a node to whether it passes."""

from collections.abc import Callable
from operator import ge, gt, le, lt
from typing import Any

from headrace.model.content.budget import Evaluation
from headrace.model.content.json_values import is_equal
from headrace.model.content.jsonpath_nodes import NOTHING, FilterTest, Get, Lookup, Test
from headrace.model.content.jsonpath_segments import CompiledPath, compile_segments
from headrace.model.content.regular_expression import compile_from_message, compile_iregexp
from headrace.model.errors import InvalidContentQuery
from headrace.model.limits import CONTENT_QUERY_DEPTH_MAX

_LITERALS = ("StringLiteral", "IntegerLiteral", "FloatLiteral", "BooleanLiteral", "Nil")
_QUERIES = ("RelativeFilterQuery", "RootFilterQuery")
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {"<": lt, "<=": le, ">": gt, ">=": ge}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


def compile_jsonpath(segments: tuple[Any, ...], depth: int = 0) -> CompiledPath:
    """Compile a parsed path."""
    return compile_segments(segments, lambda expression: _FilterCompiler(depth + 1).compile_filter(expression))


class _FilterCompiler:
    """Compiles one filter expression; refuses what RFC 9535 does not have, and too much nesting."""

    def __init__(self, depth: int) -> None:
        if depth > CONTENT_QUERY_DEPTH_MAX:
            raise InvalidContentQuery(f"the JSONPath is nested more than {CONTENT_QUERY_DEPTH_MAX} deep")
        self._depth = depth
        self._is_relative = False
        self._weight = 0
        """Operands and operators besides the first: each costs a step for each node."""

    def compile_filter(self, filter_expression: Any) -> FilterTest:
        """The test of a node; nodes are counted by the caller, here only what one costs beyond that."""
        test = self._compile_test(filter_expression.expression, self._depth)
        if (weight := self._weight - 3) <= 0:  # two operands and an operator are a step
            return FilterTest(test, self._is_relative)

        def weighted(node: Any, evaluation: Evaluation) -> bool:
            evaluation.spend(weight)
            return test(node, evaluation)

        return FilterTest(weighted, self._is_relative)

    def _compile_test(self, expression: Any, depth: int) -> Test:
        if depth > CONTENT_QUERY_DEPTH_MAX:
            raise InvalidContentQuery(f"the JSONPath is nested more than {CONTENT_QUERY_DEPTH_MAX} deep")
        self._weight += 1
        kind = type(expression).__name__
        if kind in _QUERIES:
            return self._from_root(expression, self._compile_query(expression).exists)
        if kind == "FunctionExtension" and expression.name in ("match", "search"):
            return self._compile_pattern(expression, expression.name == "match")
        if kind == "PrefixExpression" and expression.operator == "!":
            inner = self._compile_test(expression.right, depth + 1)
            return lambda node, evaluation: not inner(node, evaluation)
        if kind == "InfixExpression" and expression.operator in ("&&", "||"):
            return self._compile_chain(expression, depth)
        if kind == "InfixExpression" and expression.operator in _MIRRORED:
            return self._compile_comparison(expression.left, expression.operator, expression.right)
        raise InvalidContentQuery(f"{expression} is not in RFC 9535")

    def _compile_chain(self, expression: Any, depth: int) -> Test:
        """Conditions that are joined by one operator, however many: they are no nesting."""
        operator, tests, rest = expression.operator, [], expression
        while type(rest).__name__ == "InfixExpression" and rest.operator == operator:
            tests.append(self._compile_test(rest.left, depth + 1))
            rest = rest.right
        tests.append(self._compile_test(rest, depth + 1))
        if len(tests) == 2:
            left, right = tests
            if operator == "&&":
                return lambda node, evaluation: left(node, evaluation) and right(node, evaluation)
            return lambda node, evaluation: left(node, evaluation) or right(node, evaluation)
        ends_at = operator == "||"

        def chain(node: Any, evaluation: Evaluation) -> bool:
            for test in tests:
                if test(node, evaluation) is ends_at:
                    return ends_at
            return not ends_at

        return chain

    def _compile_query(self, query: Any) -> CompiledPath:
        segments = tuple(query.path.segments)
        self._is_relative = self._is_relative or type(query).__name__ == "RelativeFilterQuery"
        self._weight += len(segments)
        return compile_jsonpath(segments, self._depth)

    def _from_root(self, query: Any, test: Test) -> Test:
        if type(query).__name__ == "RelativeFilterQuery":
            return test
        return lambda _, evaluation: test(evaluation.root, evaluation)

    def _compile_comparison(self, left: Any, operator: str, right: Any) -> Test:
        if type(left).__name__ in _LITERALS and type(right).__name__ not in _LITERALS:
            left, operator, right = right, _MIRRORED[operator], left
        if type(right).__name__ in _LITERALS:
            check = check_against_literal(operator, _literal(right))
            lookup = self._lookup_of(left)
            if lookup is not None:
                return lambda node, _: check(lookup(node))
            get = self._compile_value(left)
            return lambda node, evaluation: check(get(node, evaluation))
        get_left, get_right = self._compile_value(left), self._compile_value(right)
        return lambda node, evaluation: compare(
            get_left(node, evaluation), operator, get_right(node, evaluation), evaluation
        )

    def _lookup_of(self, expression: Any) -> Lookup | None:
        """The plain function of a singular query on the current node: the most common operand."""
        if type(expression).__name__ != "RelativeFilterQuery":
            return None
        return self._compile_query(expression).lookup

    def _compile_value(self, expression: Any) -> Get:
        self._weight += 1
        kind = type(expression).__name__
        if kind in _LITERALS:
            literal = _literal(expression)
            return lambda _, __: literal
        if kind in _QUERIES:
            lookup = self._compile_query(expression).lookup
            if lookup is None:
                raise InvalidContentQuery(f"{expression} may select several nodes, and is compared with one")
            if kind == "RootFilterQuery":
                return lambda _, evaluation: lookup(evaluation.root)
            return lambda node, _: lookup(node)
        if kind == "FunctionExtension" and expression.name == "length":
            get = self._compile_value(expression.args[0])
            return lambda node, evaluation: _length(get(node, evaluation))
        if kind == "FunctionExtension" and expression.name in ("count", "value"):
            return self._compile_nodes_function(expression)
        raise InvalidContentQuery(f"{expression} is not in RFC 9535 where it stands")

    def _compile_nodes_function(self, function: Any) -> Get:
        query = function.args[0]
        find = self._compile_query(query).find
        is_root, is_count = type(query).__name__ == "RootFilterQuery", function.name == "count"

        def call(node: Any, evaluation: Evaluation) -> Any:
            nodes = find(evaluation.root if is_root else node, evaluation)
            if is_count:
                return len(nodes)
            return nodes[0] if len(nodes) == 1 else NOTHING

        return call

    def _compile_pattern(self, function: Any, whole: bool) -> Test:
        get_text, pattern = self._compile_value(function.args[0]), function.args[1]
        if type(pattern).__name__ == "StringLiteral":
            compiled = compile_iregexp(pattern.value)

            def match_literal(node: Any, evaluation: Evaluation) -> bool:
                text = get_text(node, evaluation)
                return type(text) is str and compiled.test(text, whole, evaluation)

            return match_literal
        get_pattern = self._compile_value(pattern)

        def match(node: Any, evaluation: Evaluation) -> bool:
            text, given = get_text(node, evaluation), get_pattern(node, evaluation)
            if type(text) is not str or type(given) is not str:
                return False
            found = compile_from_message(given, evaluation)
            return found is not None and found.test(text, whole, evaluation)

        return match


def check_against_literal(operator: str, literal: Any) -> Callable[[Any], bool]:
    """A comparison with a literal, which RFC 9535 defines for values of the same type only."""
    if operator in ("==", "!="):
        equals = _equals_literal(literal)
        return equals if operator == "==" else lambda value: not equals(value)
    if type(literal) is str:
        order = _ORDERS[operator]
        return lambda value: type(value) is str and order(value, literal)
    if type(literal) is int or type(literal) is float:
        return _number_order(operator, literal)
    return _equals_literal(literal) if operator in ("<=", ">=") else lambda _: False


def _equals_literal(literal: Any) -> Callable[[Any], bool]:
    if literal is None or type(literal) is bool:
        return lambda value: value is literal
    if type(literal) is str:
        return lambda value: type(value) is str and value == literal
    return lambda value: value == literal and value is not True and value is not False


def _number_order(operator: str, literal: Any) -> Callable[[Any], bool]:
    if operator == "<":
        return lambda value: (type(value) is int or type(value) is float) and value < literal
    if operator == "<=":
        return lambda value: (type(value) is int or type(value) is float) and value <= literal
    if operator == ">":
        return lambda value: (type(value) is int or type(value) is float) and value > literal
    return lambda value: (type(value) is int or type(value) is float) and value >= literal


def compare(left: Any, operator: str, right: Any, evaluation: Evaluation) -> bool:
    """Compare two values, or NOTHING, as section 2.3.5.2.2 of RFC 9535 says."""
    if operator == "==":
        return is_equal(left, right, evaluation)
    if operator == "!=":
        return not is_equal(left, right, evaluation)
    kind, other = type(left), type(right)
    if kind is str and other is str:
        evaluation.spend(len(left) >> 8)
        return _ORDERS[operator](left, right)
    if (kind is int or kind is float) and (other is int or other is float):
        return _ORDERS[operator](left, right)
    return operator in ("<=", ">=") and is_equal(left, right, evaluation)


def _literal(expression: Any) -> Any:
    return None if type(expression).__name__ == "Nil" else expression.value


def _length(value: Any) -> Any:
    kind = type(value)
    return len(value) if kind is str or kind is list or kind is dict else NOTHING
