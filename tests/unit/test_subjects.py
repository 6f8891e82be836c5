"""Names and patterns of subjects, and the trie that matches them."""

import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.subject_trie import SubjectTrie
from headrace.errors import InvalidArgument, LimitExceeded
from headrace.model.limits import MATCH_NODES_MAX
from headrace.model.subject import (
    Dialect,
    checked_pattern,
    checked_subject,
    is_own,
    pattern_from,
    pattern_tokens,
    subject_as,
    subject_from,
)

# Names.


@pytest.mark.parametrize(
    "subject", ["a", "orders.eu.paid", "größe.1", "$events.topic", "x" * 249, "a%2Eb", "a+b.c-d_e"]
)
def test_a_subject_is_tokens_with_dots_between_them(subject: str) -> None:
    assert checked_subject(subject) == subject


@pytest.mark.parametrize(
    "subject",
    [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        "a b",
        "a\n",
        "a\x00",
        "a.*",
        "a.#",
        "a.>",
        "a*",
        "t/a",
        "a,b",
        "a?",
        "x" * 250,
        "\u202e",
    ],
)
def test_other_texts_are_refused_as_subjects(subject: str) -> None:
    with pytest.raises(InvalidArgument, match="is no subject"):
        checked_subject(subject)


@pytest.mark.parametrize("pattern", ["*", "#", ">", "a.*.b", "#.a.#", "a.>", "*.*.#", "$events.>"])
def test_wildcards_are_tokens_of_patterns(pattern: str) -> None:
    assert checked_pattern(pattern) == pattern


@pytest.mark.parametrize("pattern", ["", "a*", "a.#b", ">.a", "a.>.b", "a..b", "x" * 250, "t/a", "**", "a. .b"])
def test_other_texts_are_refused_as_patterns(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match="is no pattern"):
        checked_pattern(pattern)


def test_patterns_that_mean_the_same_have_one_form() -> None:
    assert pattern_tokens("#.#.#.#.a") == ("#", "a")
    assert pattern_tokens("#.*.#.*") == ("*", "*", "#")
    assert pattern_tokens("#.>") == pattern_tokens("*.#") == pattern_tokens(">") == ("*", "#")


def test_the_number_of_runs_is_bounded() -> None:
    assert checked_pattern("#.a.#.a.#")
    with pytest.raises(InvalidArgument, match="2 are the most"):
        checked_pattern("#.a.#.a.#.a")


def test_subjects_and_patterns_have_a_bounded_number_of_tokens() -> None:
    assert checked_subject(".".join("a" * 32))
    assert checked_pattern(".".join("a*" * 16) + ".#")
    with pytest.raises(InvalidArgument, match="up to 32 tokens"):
        checked_subject(".".join("a" * 33))
    with pytest.raises(InvalidArgument, match="up to 32 tokens"):
        checked_pattern(".".join("*" * 33))


def test_subjects_with_a_dollar_sign_are_the_brokers_own() -> None:
    assert is_own("$events.topic")
    assert not is_own("events.$topic")


# Dialects.


def test_binding_keys_of_amqp() -> None:
    assert pattern_from("*.orange.#", Dialect.AMQP) == "*.orange.#"
    assert pattern_from("a.>", Dialect.AMQP) == "a.%3E", "`>` is an ordinary character there"
    assert subject_from("$private", Dialect.AMQP) == "%24private", "and so is `$`"
    assert subject_from("", Dialect.AMQP) == "%"


def test_filters_of_mqtt() -> None:
    assert pattern_from("sport/+/player1", Dialect.MQTT) == "sport.*.player1"
    assert pattern_from("sport/#", Dialect.MQTT) == "sport.#", "matches the parent level, too"
    assert pattern_from("/finance", Dialect.MQTT) == "%.finance"
    assert pattern_from("$SYS/#", Dialect.MQTT) == "$SYS.#"
    with pytest.raises(InvalidArgument, match="'#' can only be the last"):
        pattern_from("sport/#/ranking", Dialect.MQTT)


def test_patterns_of_nats() -> None:
    assert pattern_from("time.*.east.>", Dialect.NATS) == "time.*.east.>"
    assert pattern_from("a.#", Dialect.NATS) == "a.%23", "`#` is an ordinary character there"
    with pytest.raises(InvalidArgument, match="'>' can only be the last"):
        pattern_from("a.>.b", Dialect.NATS)


@pytest.mark.parametrize("dialect", Dialect)
@given(text=st.text(min_size=1, max_size=20))
def test_names_come_back_from_subjects(dialect: Dialect, text: str) -> None:
    if dialect is Dialect.NATIVE:
        return
    assert subject_as(subject_from(text, dialect), dialect) == text


def test_native_names_are_not_quoted() -> None:
    assert subject_from("a.b", Dialect.NATIVE) == subject_as("a.b", Dialect.NATIVE) == "a.b"
    assert pattern_from("a.>", Dialect.NATIVE) == "a.>"


# Matching.


def naive_match(pattern: str, subject: str) -> bool:
    """Whether a pattern matches a subject, straight from the definition."""
    wanted, tokens = tuple(pattern.split(".")), tuple(subject.split("."))
    if tokens[0].startswith("$") and wanted[0] in "*#>":
        return False

    @cache
    def fits(at: int, token: int) -> bool:
        if at == len(wanted):
            return token == len(tokens)
        if wanted[at] == "#":
            return fits(at + 1, token) or (token < len(tokens) and fits(at, token + 1))
        if wanted[at] == ">":
            return token < len(tokens)
        return token < len(tokens) and wanted[at] in ("*", tokens[token]) and fits(at + 1, token + 1)

    return fits(0, 0)


@pytest.mark.parametrize(
    ("pattern", "subject", "matches"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.#", "a", True),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("#", "a.b.c", True),
        ("#.c", "a.b.c", True),
        ("a.#.c", "a.c", True),
        ("#", "$events.x", False),
        (">", "$events.x", False),
        ("*.x", "$events.x", False),
        ("#.$events.x", "$events.x", False),
        ("$events.*", "$events.x", True),
        ("$events.#", "$events", True),
        ("a.#", "a.$b", True),
    ],
)
def test_what_patterns_match(pattern: str, subject: str, matches: bool) -> None:
    trie = SubjectTrie[str]()
    trie.add(pattern, "value")
    assert trie.match(subject) == (["value"] if matches else [])
    assert naive_match(pattern, subject) is matches


def inner_runs(pattern: str) -> int:
    """In how many places before the end of a pattern `#` stands, at most."""
    return pattern.split(".")[:-1].count("#")


_token = st.sampled_from(["a", "b", "$c"])
_subjects = st.lists(_token, min_size=1, max_size=6).map(".".join)
_patterns = st.builds(
    lambda tokens, end: ".".join([*tokens, *end]),
    st.lists(st.sampled_from(["a", "b", "$c", "*", "#"]), min_size=1, max_size=7),
    st.sampled_from([[], [">"]]),
).filter(lambda pattern: inner_runs(pattern) <= 2)


@given(patterns=st.lists(_patterns, max_size=12), subjects=st.lists(_subjects, max_size=6), data=st.data())
def test_the_trie_matches_as_the_definition_says(patterns: list[str], subjects: list[str], data: st.DataObject) -> None:
    trie = SubjectTrie[int]()
    for number, pattern in enumerate(patterns):
        assert trie.add(pattern, number)
    numbers = list(range(len(patterns)))
    removed = data.draw(st.lists(st.sampled_from(numbers), unique=True)) if numbers else []
    for _ in range(2):
        for subject in subjects:
            wanted = [number for number in numbers if naive_match(patterns[number], subject)]
            assert sorted(trie.match(subject)) == wanted
            assert trie.match(subject) == trie.find(subject)
        for number in removed:
            assert trie.remove(patterns[number], number) is (number in numbers)
            numbers = [other for other in numbers if other != number]
    assert len(trie) == len(numbers) == len(list(trie))
    for number in numbers:
        trie.remove(patterns[number], number)
    assert trie._root.is_unused, "all that only removed patterns needed is gone"


def test_a_value_is_added_to_a_pattern_once() -> None:
    trie = SubjectTrie[str]()
    assert trie.add("a.*", "v")
    assert not trie.add("a.*", "v")
    assert trie.add("a.b", "v")
    assert trie.match("a.b") == ["v", "v"], "once for each pattern"
    assert not trie.remove("a.c", "v")
    assert not trie.remove("a.b", "w")
    assert trie.remove("a.b", "v")
    assert trie.match("a.b") == ["v"]


def test_a_subject_follows_few_of_many_patterns() -> None:
    """Counts the nodes that are looked at instead of the time."""
    trie = SubjectTrie[int]()
    for number in range(20_000):
        trie.add(f"device.{number}.state", number)
        trie.add(f"device.{number}.#", -number - 1)
    trie.add("device.*.state", 1_000_000)
    assert sorted(trie.find("device.777.state")) == [-778, 777, 1_000_000]


def test_hostile_patterns_are_matched_step_by_step() -> None:
    trie = SubjectTrie[str]()
    trie.add("#.a.#.a.#", "hostile")
    trie.add("#." * 30 + "z", "folded")
    assert trie.find(".".join(["a"] * 32)) == ["hostile"]
    assert trie.find(".".join(["a"] * 31 + ["z"])) == ["hostile", "folded"]
    assert trie.find(".".join(["a"] * 33)) == [], "no subject has so many tokens"


class CountedWords(dict[str, Any]):
    """The words after a node; counts how often one is looked up, which is done once for each visit."""

    visits = 0

    def get(self, key: str, default: Any = None) -> Any:
        CountedWords.visits += 1
        return super().get(key, default)


def visited(trie: SubjectTrie[int], subject: str) -> int:
    """How many nodes a subject visits."""
    nodes = [trie._root]
    for node in nodes:
        node.words = CountedWords(node.words)
        nodes += [child for child in (*node.words.values(), node.one, node.many) if child is not None]
    CountedWords.visits = 0
    trie.find(subject)
    return CountedWords.visits


def hostile_pattern(chance: random.Random, number: int) -> str:
    """A pattern that fits subjects of many `a` in many ways, and differs from others only at its end."""
    runs = chance.randrange(3)
    parts = [".".join(chance.choice("a*") for _ in range(chance.randint(1, 12))) for _ in range(runs + 1)]
    return ".#.".join(parts)[:57] + f".x{number}"


@pytest.mark.parametrize("seed", range(3))
def test_no_set_of_patterns_lets_a_subject_visit_many_nodes(seed: int) -> None:
    """10,000 patterns that fit in as many ways as possible: those with which it would be too many are refused."""
    chance, trie, added = random.Random(seed), SubjectTrie[int](), dict[int, str]()
    for number in range(10_000):
        pattern = hostile_pattern(chance, number)
        try:
            trie.add(pattern, number)
            added[number] = pattern
        except LimitExceeded:
            assert number not in trie.find("a.a"), "it is not there"
    assert 5 < len(added) < 5_000
    for tokens in (["a"] * 32, ["a"] * 31 + ["z"], ["a", "b"] * 16, ["b"] * 32):
        assert visited(trie, ".".join(tokens)) <= trie.weight <= MATCH_NODES_MAX
    assert trie.add("plain.word", -1), "patterns that cost nothing are still taken"
    for number, pattern in added.items():
        assert trie.remove(pattern, number)
    assert trie.weight == 3, "only those of plain.word are left"


@given(patterns=st.lists(_patterns, max_size=30), removed=st.sets(st.integers(0, 29)))
def test_the_weight_of_a_trie_bounds_visits_and_does_not_depend_on_its_past(
    patterns: list[str], removed: set[int]
) -> None:
    trie, fresh = SubjectTrie[int](), SubjectTrie[int]()
    for number, pattern in enumerate(patterns):
        trie.add(pattern, number, limited=False)
    for number, pattern in enumerate(patterns):
        if number in removed:
            trie.remove(pattern, number)
        else:
            fresh.add(pattern, number, limited=False)
    assert trie.weight == fresh.weight
    assert all(visited(trie, subject) <= trie.weight for subject in ("a.a.a.a.a.a", "a.b.a.b", "b", ".".join("a" * 32)))


def test_many_words_after_one_cost_no_more_than_one() -> None:
    trie = SubjectTrie[int]()
    for number in range(1_000):
        trie.add(f"*.sensor{number}.#", number)
        trie.add(f"#.service{number}.failed", number)
    assert trie.weight < 200
    for number in range(1_000):
        trie.remove(f"#.service{number}.failed", number)
    assert trie.weight == 4, "the root, '*', a word and the '#' after it"
