"""An index of the topics that groups want, so that only those groups rebalance when a topic changes."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from headrace.broker.assignment import wanted_topics


class _Interest(NamedTuple):
    """The topics and patterns of a member."""

    topics: frozenset[str]
    patterns: frozenset[str]


class TopicInterests:
    """The topics and patterns that members of groups have named.

    >>> interests = TopicInterests()
    >>> interests.set("billing", "alice", ["orders"], [])
    >>> interests.set("audit", "bob", [], ["or*"])
    >>> interests.groups("orders"), interests.groups("origin"), interests.groups("other")
    (['audit', 'billing'], ['audit'], [])
    """

    def __init__(self) -> None:
        self._members: dict[tuple[str, str], _Interest] = {}
        self._topics: dict[str, Counter[str]] = {}
        """Member counts by topic and group."""
        self._patterns: dict[str, Counter[str]] = {}

    def set(self, group: str, member: str, topics: Iterable[str], patterns: Iterable[str]) -> None:
        """Replace the topics and patterns of a member."""
        self.remove(group, member)
        interest = self._members[group, member] = _Interest(frozenset(topics), frozenset(patterns))
        for table, names in zip((self._topics, self._patterns), interest, strict=True):
            for name in names:
                table.setdefault(name, Counter())[group] += 1

    def remove(self, group: str, member: str) -> None:
        """Remove a member."""
        interest = self._members.pop((group, member), None)
        if interest is None:
            return
        for table, names in zip((self._topics, self._patterns), interest, strict=True):
            for name in names:
                table[name][group] -= 1
                if not table[name][group]:
                    del table[name][group]
                if not table[name]:
                    del table[name]

    def groups(self, topic: str) -> list[str]:
        """The groups that want a topic, by name."""
        found = set(self._topics.get(topic, ()))
        for pattern, groups in self._patterns.items():
            if wanted_topics((), (pattern,), (topic,)):
                found.update(groups)
        return sorted(found)
