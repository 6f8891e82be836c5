"""A trie of subject patterns: finds what is subscribed to a subject."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from headrace.model.errors import LimitExceeded
from headrace.model.limits import MATCH_NODES_MAX, SUBJECT_TOKENS_MAX
from headrace.model.subject import MANY, ONE, OWN_MARK, pattern_tokens

Value = TypeVar("Value", bound=Hashable)

_CACHED_MAX = 4096
"""Subjects whose matches are remembered until a pattern is added or removed."""
_SCANNED_MAX = 8
"""Words after a node whose weights are looked through; those of more are counted."""


class TrieNode(Generic[Value]):
    """What may follow a beginning of patterns."""

    __slots__ = ("heaviest", "is_many", "many", "one", "values", "weight", "weights", "words")

    def __init__(self, *, is_many: bool = False) -> None:
        self.is_many = is_many
        """Whether it is reached by `#`: it then stays reached, whatever token follows."""
        self.words: dict[str, TrieNode[Value]] = {}
        self.one: TrieNode[Value] | None = None
        """After `*`."""
        self.many: TrieNode[Value] | None = None
        """After `#`."""
        self.values: dict[Value, None] = {}
        """Those of the patterns that end here, in the order of their coming."""
        self.weight = 1
        """How many nodes a subject can visit from here on, at most, for each time that it comes here."""
        self.heaviest = 0
        """The largest weight after a word: of all words, a token of a subject is only one."""
        self.weights: dict[int, int] | None = None
        """How many words have which weight, if there are many."""

    @property
    def is_unused(self) -> bool:
        """Whether no pattern ends here or goes on from here."""
        return not (self.values or self.words or self.one or self.many)

    def child(self, token: str) -> "TrieNode[Value] | None":
        """The node after a token of a pattern."""
        return self.one if token == ONE else self.many if token == MANY else self.words.get(token)

    def set_child(self, token: str, child: "TrieNode[Value] | None") -> None:
        """Replace the node after a token of a pattern."""
        if token == ONE:
            self.one = child
        elif token == MANY:
            self.many = child
        elif child is None:
            del self.words[token]
        else:
            self.words[token] = child

    def weigh(self, token: str, before: int, after: int) -> None:
        """Weigh again, after the weight of the node after a token changed; 0 is the weight of none."""
        if token not in (ONE, MANY):
            self.heaviest = self._heaviest(before, after)
        below = self.heaviest + (self.one.weight if self.one is not None else 0)
        if self.is_many:  # it stays reached: each token that follows may go on from here
            self.weight = SUBJECT_TOKENS_MAX * (1 + below) if below else 1
        else:
            self.weight = 1 + below + (self.many.weight if self.many is not None else 0)

    def _heaviest(self, before: int, after: int) -> int:
        weights = self.weights
        if weights is None:
            if len(self.words) <= _SCANNED_MAX:
                return max([child.weight for child in self.words.values()], default=0)
            weights = self.weights = {}
            for child in self.words.values():
                weights[child.weight] = weights.get(child.weight, 0) + 1
        else:
            if after:
                weights[after] = weights.get(after, 0) + 1
            if before:
                weights[before] -= 1
                if not weights[before]:
                    del weights[before]
        return max(weights, default=0)


class SubjectTrie(Generic[Value]):
    """Values by pattern; patterns that have the same normal form are one.

    All beginnings of patterns that fit a subject are followed at once, token by token, and each only once: so the time
    grows with the number of tokens and of beginnings that fit, and not with the number of ways to fit them. How many
    nodes a subject can visit is known beforehand, and a pattern with which it could be too many is refused.

    >>> trie = SubjectTrie[str]()
    >>> trie.add("orders.*.paid", "billing"), trie.add("orders.#", "audit")
    (True, True)
    >>> trie.match("orders.eu.paid")
    ['audit', 'billing']
    """

    def __init__(self) -> None:
        self._root: TrieNode[Value] = TrieNode()
        self._count = 0
        self._matches: dict[str, list[Value]] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def weight(self) -> int:
        """How many nodes any subject can visit, at most."""
        return self._root.weight

    def add(self, pattern: str, value: Value, *, limited: bool = True) -> bool:
        """Add a value under a pattern; whether it was not there yet.

        Raises:
            LimitExceeded: if a subject could then visit too many nodes, unless it is not `limited`.
        """
        node, before = self._root, self.weight
        path: list[tuple[TrieNode[Value], str]] = []
        new = 0
        for token in pattern_tokens(pattern):
            path.append((node, token))
            child = node.child(token)
            if child is None:
                child, new = TrieNode(is_many=token == MANY), new + 1
                node.set_child(token, child)
            node = child
        if value in node.values:
            return False
        if new:
            _weigh_grown(path, len(path) - new)
        node.values[value] = None
        self._count += 1
        if limited and self.weight > max(before, MATCH_NODES_MAX):
            self.remove(pattern, value)
            raise LimitExceeded(
                f"with the pattern {pattern}, a subject could fit the patterns that are there in too many ways: use "
                "fewer '#' before the end, fewer '*', and more words before them"
            )
        self._matches.clear()
        return True

    def check(self, pattern: str, value: Value) -> None:
        """Refuse a pattern, as `add` would, without adding it."""
        if self.add(pattern, value):
            self.remove(pattern, value)

    def remove(self, pattern: str, value: Value) -> bool:
        """Remove a value from a pattern, and what only this pattern needed; whether it was there."""
        node: TrieNode[Value] | None = self._root
        path: list[tuple[TrieNode[Value], str]] = []
        for token in pattern_tokens(pattern):
            assert node is not None
            path.append((node, token))
            node = node.child(token)
            if node is None:
                return False
        assert node is not None
        if value not in node.values:
            return False
        del node.values[value]
        self._count -= 1
        self._matches.clear()
        if node.is_unused:
            _prune(path, node.weight)
        return True

    def match(self, subject: str) -> list[Value]:
        """The values of all patterns that match a subject, one for each pattern. Not to be changed."""
        matches = self._matches.get(subject)
        if matches is None:
            matches = self.find(subject)
            if len(self._matches) >= _CACHED_MAX:
                self._matches.clear()
            self._matches[subject] = matches
        return matches

    def find(self, subject: str) -> list[Value]:
        """As `match`, without a look at what was found before."""
        tokens = subject.split(".")
        if len(tokens) > SUBJECT_TOKENS_MAX:
            return []  # no subject: a key that is taken for one
        root = self._root
        ended: dict[TrieNode[Value], None] = {}
        """Nodes at which patterns that end with `#` end: they match whatever follows."""
        reached: dict[TrieNode[Value], None] = {}
        if subject.startswith(OWN_MARK):  # only a pattern that begins with this very word matches
            child = root.words.get(tokens[0])
            if child is not None:
                _reach(child, reached, ended)
            tokens = tokens[1:]
        else:
            _reach(root, reached, ended)
        for token in tokens:
            before, reached = reached, {}
            for node in before:
                child = node.words.get(token)
                if child is not None:
                    _reach(child, reached, ended)
                if node.one is not None:
                    _reach(node.one, reached, ended)
                if node.is_many:
                    reached[node] = None
            if not reached:
                break
        ended.update(reached)
        return [value for node in ended for value in node.values]

    def __iter__(self) -> Iterator[Value]:
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            yield from node.values
            nodes += [child for child in (*node.words.values(), node.one, node.many) if child is not None]


def _reach(node: TrieNode[Value], reached: dict[TrieNode[Value], None], ended: dict[TrieNode[Value], None]) -> None:
    """Add a node, and the one after `#`, which may stand for no token."""
    reached[node] = None
    many = node.many
    if many is not None:
        if many.values:
            ended[many] = None
        if many.words or many.one is not None:
            reached[many] = None


def _weigh_grown(path: list[tuple[TrieNode[Value], str]], first_new: int) -> None:
    """Weigh the nodes of a pattern again, of whose nodes after a token those from `first_new` on are new."""
    before = 0
    for depth in range(len(path) - 1, -1, -1):
        parent, token = path[depth]
        child, own = parent.child(token), parent.weight
        assert child is not None
        parent.weigh(token, 0 if depth >= first_new else before, child.weight)
        if depth <= first_new and parent.weight == own:
            break
        before = own


def _prune(path: list[tuple[TrieNode[Value], str]], before: int) -> None:
    """Remove the nodes of a pattern that nothing needs, and weigh the others again; `before`: the last one's weight."""
    for parent, token in reversed(path):
        child, own, after = parent.child(token), parent.weight, 0
        assert child is not None
        if child.is_unused:
            parent.set_child(token, None)
        else:
            after = child.weight
        if after == before:
            break
        parent.weigh(token, before, after)
        before = own
