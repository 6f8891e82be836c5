"""Content queries: four kinds of condition on a message's value, none of which can take long."""

import builtins
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonpath import JSONPathEnvironment
from jsonpath.selectors import SliceSelector

from headrace.errors import HeadraceError
from headrace.model.content import jsonpath_parser
from headrace.model.content.budget import Evaluation, OverBudget
from headrace.model.content.decoded_values import DecodedValues
from headrace.model.content.json_values import is_equal
from headrace.model.content.jsonpath_filters import compile_jsonpath
from headrace.model.content.jsonpath_parser import parse_jsonpath
from headrace.model.content.matcher import compile_query
from headrace.model.content.query import ContentQuery
from headrace.model.errors import ContentSupportMissing, InvalidContentQuery
from headrace.model.limits import CONTENT_BYTES_MAX, CONTENT_STEPS_MAX

STORE: dict[str, Any] = {
    "store": {
        "book": [
            {"category": "reference", "author": "Nigel Rees", "title": "Sayings of the Century", "price": 8.95},
            {"category": "fiction", "author": "Evelyn Waugh", "title": "Sword of Honour", "price": 12.99},
            {"category": "fiction", "author": "Herman Melville", "title": "Moby Dick", "isbn": "0-553", "price": 8.99},
            {"category": "fiction", "author": "J. R. R. Tolkien", "title": "The Lord of the Rings", "price": 22.99},
        ],
        "bicycle": {"color": "red", "price": 399},
    }
}
FILTERED: dict[str, Any] = {
    "a": [3, 5, 1, 2, 4, 6, {"b": "j"}, {"b": "k"}, {"b": {}}, {"b": "kilo"}],
    "o": {"p": 1, "q": 2, "r": 3, "s": 5, "t": {"u": 6}},
    "e": "f",
}
COMPARED: dict[str, Any] = {"obj": {"x": "y"}, "arr": [2, 3]}


def find(path: str, document: Any) -> list[Any]:
    return compile_jsonpath(parse_jsonpath(path)).find(document, Evaluation(document))


def matched(value: Any, **query: Any) -> bool:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return compile_query(ContentQuery(**query)).select(DecodedValues([data])).matched == [0]


BOOKS = STORE["store"]["book"]
A = FILTERED["a"]
RFC_9535 = [  # sections 1.5, 2.3.1.3 to 2.3.4.3, 2.3.5.3 and 2.5 of the RFC
    ("$.store.book[*].author", STORE, [book["author"] for book in BOOKS]),
    ("$..author", STORE, [book["author"] for book in BOOKS]),
    ("$.store.*", STORE, [BOOKS, STORE["store"]["bicycle"]]),
    ("$.store..price", STORE, [8.95, 12.99, 8.99, 22.99, 399]),
    ("$..book[2]", STORE, [BOOKS[2]]),
    ("$..book[2].publisher", STORE, []),
    ("$..book[-1]", STORE, [BOOKS[3]]),
    ("$..book[0,1]", STORE, BOOKS[:2]),
    ("$..book[:2]", STORE, BOOKS[:2]),
    ("$..book[?@.isbn]", STORE, [BOOKS[2]]),
    ("$..book[?@.price<10]", STORE, [BOOKS[0], BOOKS[2]]),
    ("$", {"k": "v"}, [{"k": "v"}]),
    ("$.o['j j']['k.k']", {"o": {"j j": {"k.k": 3}}}, [3]),
    ('$["\'"]["@"]', {"'": {"@": 2}}, [2]),
    ("$[1]", ["a", "b"], ["b"]),
    ("$[-2]", ["a", "b"], ["a"]),
    ("$[1:3]", list("abcdefg"), ["b", "c"]),
    ("$[5:]", list("abcdefg"), ["f", "g"]),
    ("$[1:5:2]", list("abcdefg"), ["b", "d"]),
    ("$[5:1:-2]", list("abcdefg"), ["f", "d"]),
    ("$[::-1]", list("abcdefg"), list("gfedcba")),
    ("$[0:2:0]", ["a", "b"], []),
    ("$[0:1]", "abc", []),
    ("$.a[?@.b == 'kilo']", FILTERED, [{"b": "kilo"}]),
    ("$.a[?@>3.5]", FILTERED, [5, 4, 6]),
    ("$.a[?@.b]", FILTERED, A[6:]),
    ("$[?@.*]", FILTERED, [A, FILTERED["o"]]),
    ("$[?@[?@.b]]", FILTERED, [A]),
    ("$.o[?@<3, ?@<3]", FILTERED, [1, 2, 1, 2]),
    ("$.a[?@<2 || @.b == 'k']", FILTERED, [1, {"b": "k"}]),
    ("$.a[?match(@.b, '[jk]')]", FILTERED, [{"b": "j"}, {"b": "k"}]),
    ("$.a[?search(@.b, '[jk]')]", FILTERED, [{"b": "j"}, {"b": "k"}, {"b": "kilo"}]),
    ("$.o[?@>1 && @<4]", FILTERED, [2, 3]),
    ("$.o[?@.u || @.x]", FILTERED, [{"u": 6}]),
    ("$.a[?@.b == $.x]", FILTERED, [3, 5, 1, 2, 4, 6]),
    ("$.a[?@ == @]", FILTERED, A),
    ("$..[0]", {"o": {"j": 1}, "a": [5, 3, [{"j": 4}]]}, [5, {"j": 4}]),
    ("$.o..[*, *]", {"o": {"j": 1, "k": 2}}, [1, 2, 1, 2]),
    ("$.a", {"a": None}, [None]),
    ("$.a[0]", {"a": None}, []),
    ("$.b[?@==null]", {"b": [None]}, [None]),
    ("$[?length(@) == 2]", ["ab", [1, 2], {"a": 1, "b": 2}, 2, "ü"], ["ab", [1, 2], {"a": 1, "b": 2}]),
    ("$[?length(@.x) == length(@.y)]", [{"z": 1}], [{"z": 1}]),
    ("$[?count(@.*) == 1]", [[1], [1, 2], {"a": 1}, 1], [[1], {"a": 1}]),
    ("$[?value(@..color) == 'red']", [{"a": {"color": "red"}}, {"color": 1, "a": {"color": "red"}}], None),
    ("$[?!@.a]", [{"a": 0}, {"b": 0}], [{"b": 0}]),
    ("$[?!(@.a > 1)]", [{"a": 1}, {"a": 2}, {}], [{"a": 1}, {}]),
    ("$[?@]", [0, False, "", None], [0, False, "", None]),
    ("$[?@.a < 2]", [{"a": True}, {"a": 1}, {"a": "1"}], [{"a": 1}]),
    ("$[?@.a == 1]", [{"a": True}, {"a": 1}, {"a": 1.0}], [{"a": 1}, {"a": 1.0}]),
    ("$[?match(@, 'a.c')]", ["abc", "a\rc", "a\nc", "xabc"], ["abc"]),
    ("$[?match(@, 'a[.]c')]", ["abc", "a.c"], ["a.c"]),
    ("$[?match(@, 'a\\\\.c')]", ["abc", "a.c"], ["a.c"]),
    ("$[?search(@.text, @.pattern)]", [{"text": "abc", "pattern": "b"}, {"text": "b", "pattern": "("}], None),
]


@pytest.mark.parametrize(("path", "document", "nodes"), RFC_9535)
def test_paths_select_what_the_rfc_says(path: str, document: Any, nodes: list[Any] | None) -> None:
    expected = document[:1] if nodes is None else nodes
    found = find(path, document)
    assert len(found) == len(expected)
    assert all(is_equal(one, other) for one, other in zip(found, expected, strict=True))
    assert matched(document, jsonpath=path) is bool(expected)


COMPARISONS = [  # table 11 of the RFC
    ("$.absent1 == $.absent2", True),
    ("$.absent1 <= $.absent2", True),
    ("$.absent == 'g'", False),
    ("$.absent1 != $.absent2", False),
    ("$.absent != 'g'", True),
    ("1 <= 2", True),
    ("1 > 2", False),
    ("13 == '13'", False),
    ("'a' <= 'b'", True),
    ("'a' > 'b'", False),
    ("$.obj == $.arr", False),
    ("$.obj != $.arr", True),
    ("$.obj == $.obj", True),
    ("$.obj != $.obj", False),
    ("$.arr == $.arr", True),
    ("$.obj == 17", False),
    ("$.obj != 17", True),
    ("$.obj <= $.arr", False),
    ("$.obj < $.arr", False),
    ("$.obj <= $.obj", True),
    ("$.arr <= $.arr", True),
    ("1 <= $.arr", False),
    ("1 >= $.arr", False),
    ("1 > $.arr", False),
    ("1 < $.arr", False),
    ("true <= true", True),
    ("true > true", False),
]


@pytest.mark.parametrize(("comparison", "expected"), COMPARISONS)
def test_comparisons_are_those_of_the_rfc(comparison: str, expected: bool) -> None:
    assert matched(COMPARED, jsonpath=f"$[?{comparison}]") is expected


@pytest.mark.parametrize(
    "path",
    [
        "a.b",
        "$.a ",
        " $.a",
        "$.",
        "$..",
        "$[",
        "$[01]",
        "$[1e2]",
        "$[?1e400 == @.a]",
        "$[9007199254740992]",
        "$[?@.a]x",
        "$.a | $.b",
        "$.a & $.b",
        "^.a",
        "$.~a",
        "$[~'a']",
        "$[?#=='a']",
        "$[?@.a =~ /b/]",
        "$[?@.a in ['b']]",
        "$[?@.a == ['b']]",
        "$[?@.a <> 1]",
        "$[?@.a and @.b]",
        "$[?not @.a]",
        "$[?@.a == 1 == 2]",
        "$[?!@.a == 1]",
        "$[?true]",
        "$[?@.* == 1]",
        "$[?length(@.a)]",
        "$[?count(1) == 1]",
        "$[?match(@.a)]",
        "$[?match(@.a, 'b') == true]",
        "$[?startswith(@.a, 'b')]",
        "$[?nosuch(@.a)]",
        "$[?match(@.a, '(')]",
        "$[?match(@.a, '(?=a)b')]",
        "$[$.a]",
        "$[?" + "!(" * 100 + "@.a" + ")" * 100 + "]",
        "$" + "[?@" * 60 + "]" * 60,
    ],
)
def test_what_is_not_in_the_rfc_is_refused(path: str) -> None:
    with pytest.raises(InvalidContentQuery):
        compile_query(ContentQuery(jsonpath=path))


# Random documents and paths: the compiled path selects what the library's own evaluator does. Where the library is
# laxer than the RFC (booleans that order as numbers, slices of strings), it is put right here.


class Library(JSONPathEnvironment):
    """The library's evaluator with the RFC's comparisons."""

    def _eq(self, left: object, right: object) -> bool:
        if type(left).__name__ == "NodeList" or type(right).__name__ == "NodeList":
            return super()._eq(left, right)
        return is_equal(left, right)

    def _lt(self, left: object, right: object) -> bool:
        return not isinstance(left, bool) and not isinstance(right, bool) and super()._lt(left, right)


@pytest.fixture(autouse=True)
def _slices_of_arrays_only(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = SliceSelector.resolve
    monkeypatch.setattr(
        SliceSelector, "resolve", lambda self, node: () if isinstance(node.obj, str) else resolve(self, node)
    )


NAMES = st.sampled_from(["a", "b", "c"])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.5, 1.0, -2.5]),
    st.sampled_from(["", "a", "ab", "b"]),
)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=12,
)
INDEXES = st.integers(-3, 3)
BOUNDS = st.one_of(st.just(""), INDEXES.map(str))
LITERALS = st.sampled_from(["null", "true", "false", "1", "-2", "0.5", "1.0", "'a'", "'ab'", "''"])
SINGULAR = st.lists(st.one_of(NAMES.map(".{}".format), INDEXES.map("[{}]".format)), min_size=1, max_size=3).map("".join)


OPERATORS = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])


@st.composite
def _queries(draw: st.DrawFn, depth: int = 0) -> str:
    """What follows `$` or `@`."""
    if depth > 2:
        return draw(SINGULAR)
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        several = ", ".join(draw(_selectors(depth)) for _ in range(draw(st.integers(1, 2))))
        segments.append(
            draw(st.sampled_from([".a", ".b", f"[{several}]", f"[{several}]", f"..[{several}]", ".*", "..a"]))
        )
    return "".join(segments)


@st.composite
def _selectors(draw: st.DrawFn, depth: int) -> str:
    kind = draw(st.sampled_from(["name", "index", "all", "slice", "filter", "filter"]))
    if kind == "filter":
        return f"?{draw(_conditions(depth + 1))}"
    if kind == "slice":
        return f"{draw(BOUNDS)}:{draw(BOUNDS)}{draw(st.sampled_from(['', ':1', ':2', ':-1']))}"
    return {"name": f"'{draw(NAMES)}'", "index": str(draw(INDEXES)), "all": "*"}[kind]


@st.composite
def _values(draw: st.DrawFn, depth: int) -> str:
    kind = draw(st.sampled_from(["literal", "singular", "singular", "current", "length", "count", "value"]))
    if kind in ("literal", "current"):
        return draw(LITERALS) if kind == "literal" else "@"
    start = draw(st.sampled_from("@$"))
    if kind in ("singular", "length"):
        query = start + draw(SINGULAR)
        return query if kind == "singular" else f"length({query})"
    return f"{kind}({start}{draw(_queries(depth))})"


@st.composite
def _conditions(draw: st.DrawFn, depth: int) -> str:
    kind = draw(st.sampled_from(["compare", "compare", "exists", "match", "search", "and", "or", "not"]))
    start = draw(st.sampled_from("@$"))
    if kind in ("match", "search"):
        pattern = draw(st.one_of(st.sampled_from(["'a.?'", "'b'"]), SINGULAR.map("@{}".format)))
        return f"{kind}({start}{draw(SINGULAR)}, {pattern})"
    if kind == "exists":
        return start + draw(_queries(depth))
    if kind == "compare" or depth > 3:
        return f"{draw(_values(depth))} {draw(OPERATORS)} {draw(_values(depth))}"
    first, second = draw(_conditions(depth + 1)), draw(_conditions(depth + 1))
    return {"and": f"{first} && {second}", "or": f"({first} || {second})", "not": f"!({first})"}[kind]


PATHS = _queries().map("${}".format).filter(lambda path: len(path) <= 1000)


@settings(max_examples=200, deadline=None)
@given(PATHS, DOCUMENTS)
def test_compiled_paths_select_what_the_library_selects(path: str, document: Any) -> None:
    wrapped = [document] if not isinstance(document, dict | list) else document  # the library decodes a bare string
    expected = Library(strict=True).compile(path).findall(wrapped)
    try:
        found = find(path, wrapped)
    except OverBudget:
        return
    assert len(found) == len(expected), path
    assert all(is_equal(one, other) for one, other in zip(found, expected, strict=True)), path
    assert matched(wrapped, jsonpath=path) is bool(expected)


def test_exact_compares_the_whole_value() -> None:
    document = {"a": [1, {"b": None}], "c": True}
    assert matched(b' {"c": true, "a": [1.0, {"b": null}]} ', exact=document)
    assert not matched({**document, "d": 1}, exact=document)
    assert not matched({"a": [1, {"b": None}], "c": 1}, exact=document)
    assert matched(b"null", exact=None)
    assert not matched(b"0", exact=None)
    assert not matched(b"1", exact=True)
    assert matched(b'{"a":1,"a":2}', exact={"a": 2})  # the last of two members of a name counts


def test_partial_needs_only_its_members() -> None:
    order = {"id": 7, "customer": {"country": "CH", "name": "Erika"}, "tags": ["a", "b"]}
    assert matched(order, partial={"customer": {"country": "CH"}})
    assert matched(order, partial={})
    assert matched(order, partial={"tags": ["a", "b"]})
    assert not matched(order, partial={"tags": ["a"]})
    assert not matched(order, partial={"customer": {"country": None}})
    assert not matched(order, partial={"customer": {"country": "CH", "age": None}})
    assert not matched([order], partial={"id": 7})


def test_regular_expressions_search_the_bytes() -> None:
    assert matched(b"2026-11-18 ERROR disk full", regex=r"\bERROR\b")
    assert not matched(b"2026-11-18 INFO", regex="ERROR")
    assert matched(b"\xff\x00 caf\xc3\xa9", regex="caf.$")
    for pattern in (r"(a)\1", "(?=a)", "(", "a{1001}", "[ab]*a[ab]{999}", r"\pL{300}"):
        with pytest.raises(InvalidContentQuery):
            compile_query(ContentQuery(regex=pattern))


def test_values_that_are_not_json_match_no_json_query() -> None:
    values = [None, b"", b"{", b"\xff", b"NaN", b"[1]"]
    for query in ({"jsonpath": "$"}, {"exact": [1]}, {"jsonpath": "$.*"}):
        selection = compile_query(ContentQuery(**query)).select(DecodedValues(values))
        assert selection[:3] == ([5], [], 6)


@pytest.mark.parametrize(
    "query", [{"exact": 1}, {"partial": {"a": 1}}, {"jsonpath": "$"}, {"jsonpath": "$..a"}, {"jsonpath": "$[?@ == $]"}]
)
def test_deep_and_large_values_are_failed(query: dict[str, Any]) -> None:
    nested = [b"[" * depth + b"]" * depth for depth in (129, 500, 5_000, 400_000)]
    objects = b'{"a":' * 500 + b"1" + b"}" * 500
    large = b'"' + b"x" * CONTENT_BYTES_MAX + b'"'
    selection = compile_query(ContentQuery(**query)).select(DecodedValues([*nested, objects, large, b"[" * 400_000]))
    assert selection.matched == []
    assert selection.failed == list(range(7))
    deep = b"[" * 128 + b"]" * 128
    assert compile_query(ContentQuery(**query)).select(DecodedValues([deep])).failed == []


HOSTILE = [
    "$" + "..*" * 40,
    "$" + "[*,*,*]" * 60,
    "$..[?@..[?@..[?@..*]]]",
    "$[?count($..*) > 1 && count($..*) == 0]",
    "$[?@ == $ && @ != $]",
    "$..[?value(@..*) == value(@..*)]",
    "$[?" + " || ".join(["@.x == $.y.z.w"] * 40) + "]",
    "$..[?search(@, 'x*x*x*x*y')]",
    "$..[?search(@, @)]",
    "$[?$.text < $.texts]",
]


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_paths_end_within_the_budget(path: str) -> None:
    deep: Any = 1
    for _ in range(100):
        deep = {"a": deep, "b": [1, "x" * 100]}
    wide = {"text": "x" * 100_000, "texts": "x" * 100_000 + "y", **{f"n{n}": [{"v": [n, str(n)]}] for n in range(4000)}}
    decoded = DecodedValues([msgspec.json.encode(each) for each in (deep, wide)])
    spent = []
    for document in decoded.documents():
        evaluation = Evaluation(document)
        try:
            compile_jsonpath(parse_jsonpath(path)).exists(document, evaluation)
        except OverBudget:
            spent.append(True)
        assert evaluation.left <= CONTENT_STEPS_MAX
    selection = compile_query(ContentQuery(jsonpath=path)).select(decoded)
    assert len(selection.failed) == len(spent)
    assert not set(selection.matched) & set(selection.failed)


@pytest.mark.parametrize(
    "query", [{"exact": {"a": 1}}, {"partial": {"a": 1}}, {"jsonpath": "$.a"}, {"jsonpath": "$..a"}]
)
def test_json_that_cannot_be_represented_is_failed(query: dict[str, Any]) -> None:
    numbers = [b'{"a": 1e999}', b"-1e999", b'{"a": ' + b"9" * 5000 + b"}"]
    halves = [b'{"a": "\\ud800"}', b'{"\\uDC00": 1}', b'["\\ud800\\u0041"]', b'{"a": "\\ude00\\ud83d"}']
    others = [b'{"a": "\\ud800"', b'{"a": "\\ud83d\\ude00"', b"\\ud800", b'{"a": NaN, "b": "\\ud800"}', b'"\xff"']
    values = [*numbers, *halves, *others]
    selection = compile_query(ContentQuery(**query)).select(DecodedValues(values))
    assert selection[:2] == ([], [0, 1, 2, 3, 4, 5, 6]), "the others are not JSON"


def test_patterns_in_messages_cost_steps() -> None:
    matcher = compile_query(ContentQuery(jsonpath="$[?search('a', @)]"))
    few, many = [r"\pL{9}"] * 2, [r"\pL{9}"] * 3
    values = [msgspec.json.encode(each) for each in (["b", "a"], few, many, ["b" * 101], ["("], ["b"] * 20)]
    assert matcher.select(DecodedValues(values))[:2] == ([0], [2, 3, 5])


def test_regular_expressions_fail_on_values_too_long_for_them() -> None:
    matcher = compile_query(ContentQuery(regex="[ab]*a[ab]{400}c"))
    assert matcher.select(DecodedValues([b"ab" * 10, b"ab" * 100_000, None]))[:3] == ([], [1], 3)


@pytest.mark.parametrize(
    "query", [{"exact": [1]}, {"jsonpath": "$[0]"}, {"jsonpath": "$[?@ == 1]"}, {"jsonpath": "$..*"}, {"regex": "1"}]
)
def test_selecting_in_pieces_gives_the_same(query: dict[str, Any]) -> None:
    values = [b"[1]", b"x", None, b"[" * 200 + b"]" * 200, b"[2]", b"[1]"] * 50
    matcher = compile_query(ContentQuery(**query))
    whole = matcher.select(DecodedValues(values))
    decoded, start, matches, failures, pieces = DecodedValues(values), 0, [], [], 0
    while start < len(values):
        selection = matcher.select(decoded, start, steps_max=10)
        assert selection.end > start
        matches += selection.matched
        failures += selection.failed
        start, pieces = selection.end, pieces + 1
    assert pieces > 10
    assert (matches, failures) == (whole.matched, whole.failed)


def test_each_value_is_decoded_once_for_all_queries() -> None:
    decoded = DecodedValues([b'{"a": 1}', b"[2]"])
    documents = decoded.documents()
    for query in ({"jsonpath": "$.a"}, {"jsonpath": "$..*"}, {"partial": {"a": 1}}):
        compile_query(ContentQuery(**query)).select(decoded)
    assert decoded.documents() is documents
    assert len(documents) == 2


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"exact": 1, "regex": "a"},
        {"regex": ""},
        {"regex": "a" * 1001},
        {"jsonpath": "$" + ".a" * 600},
        {"regex": 7},
        {"regex": "\ud800"},
        {"partial": [1]},
        {"exact": {1: 2}},
        {"exact": b"bytes"},
        {"exact": float("nan")},
        {"exact": 1 << 70},
        {"exact": "x" * 20_000},
        {"exact": "\udfff"},
    ],
)
def test_malformed_queries_are_refused(query: dict[str, Any]) -> None:
    with pytest.raises(InvalidContentQuery):
        ContentQuery(**query)


def test_queries_nested_too_deep_are_refused() -> None:
    nested: Any = 1
    for _ in range(40):
        nested = [nested]
    with pytest.raises(InvalidContentQuery, match="nested"):
        ContentQuery(exact=nested)
    with pytest.raises(InvalidContentQuery, match="nested"):
        ContentQuery(partial={"a": nested})


@pytest.mark.parametrize("query", [{"exact": None}, {"partial": {"a": [1, None]}}, {"regex": "a"}, {"jsonpath": "$.a"}])
def test_queries_survive_every_encoding(query: dict[str, Any]) -> None:
    content = ContentQuery(**query)
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(content), type=ContentQuery) == content
    assert msgspec.convert(msgspec.to_builtins(content), ContentQuery) == content
    assert content.as_dict() == query


@pytest.mark.parametrize(("package", "query"), [("re2", {"regex": "a"}), ("jsonpath", {"jsonpath": "$.a"})])
def test_a_missing_package_is_named(package: str, query: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **named: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest, **named)

    jsonpath_parser._environment.cache_clear()
    monkeypatch.setattr(builtins, "__import__", absent)
    try:
        with pytest.raises(ContentSupportMissing, match=r"pip install 'headrace\[content\]'") as caught:
            compile_query(ContentQuery(**query))
    finally:
        jsonpath_parser._environment.cache_clear()
    assert isinstance(caught.value, HeadraceError)
    assert caught.value.code == "content_support_missing"
    assert compile_query(ContentQuery(partial={"a": 1})).select(DecodedValues([b'{"a":1}'])).matched == [0]
