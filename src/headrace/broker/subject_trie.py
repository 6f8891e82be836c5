"""A trie of subject patterns: finds what is subscribed to a subject."""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from headrace.model.subject import MANY, ONE, OWN_MARK, pattern_tokens

Value = TypeVar("Value", bound=Hashable)

_CACHED_MAX = 4096
"""Subjects whose matches are remembered until a pattern is added or removed."""


class TrieNode(Generic[Value]):
    """What may follow a beginning of patterns."""

    __slots__ = ("is_many", "many", "one", "values", "words")

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


class SubjectTrie(Generic[Value]):
    """Values by pattern; patterns that have the same normal form are one.

    All beginnings of patterns that fit a subject are followed at once, token by token, and each only once: so the time
    grows with the number of tokens and of beginnings that fit, and not with the number of ways to fit them.

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

    def add(self, pattern: str, value: Value) -> bool:
        """Add a value under a pattern; whether it was not there yet."""
        node = self._root
        for token in pattern_tokens(pattern):
            child = node.child(token)
            if child is None:
                child = TrieNode(is_many=token == MANY)
                node.set_child(token, child)
            node = child
        if value in node.values:
            return False
        node.values[value] = None
        self._count += 1
        self._matches.clear()
        return True

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
        for parent, token in reversed(path):
            child = parent.child(token)
            if child is None or not child.is_unused:
                break
            parent.set_child(token, None)
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
