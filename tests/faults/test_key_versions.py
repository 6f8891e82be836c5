"""Versions of keys on a disk that fails: exact whatever happens, and each version is given once."""

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.faults.version_model import KEYS, VersionBooks

from headrace.testing import Unsynced

KEY = st.sampled_from(KEYS)
APART = st.sampled_from([None, 0, 0, 0, 1, -1])
"""How far an expected version is from the right one; None: nothing is expected."""


class VersionsOnAFaultyDisk(RuleBasedStateMachine):
    """Publishers expect right and wrong versions; the broker is killed, loses power, restarts and compacts."""

    @initialize(seed=st.integers(0, 2**32), compact=st.booleans())
    def begin(self, seed: int, compact: bool) -> None:
        self.books = VersionBooks(seed, compact=compact)

    def teardown(self) -> None:
        if hasattr(self, "books"):
            self.books.disk.crash_after(1 << 60)
            self.books.check()
            self.books.close()

    def expected(self, key: bytes, apart: int | None) -> int | None:
        """The version as a publisher knows it that has just looked."""
        if apart is None:
            return None
        self.books.run()
        found = [0]
        self.books.attempt(lambda: found.append(self.books.next_version(key)))
        return max(found[-1] + apart, 0)

    @rule(key=KEY, count=st.integers(1, 20), apart=APART, numbered=st.booleans(), answered=st.booleans())
    def publish(self, key: bytes, count: int, apart: int | None, numbered: bool, answered: bool) -> None:
        crashes = self.books.crashes
        expected = self.expected(key, apart)
        attempt = self.books.publish(key, count, expected, numbered=numbered)
        if answered:
            self.books.run()
            if apart == 0 and crashes == self.books.crashes and attempt in self.books.attempts:
                assert attempt.fate == "acknowledged", "nobody else has published, and it was refused"
            if apart in (1, -1) and expected and crashes == self.books.crashes and attempt in self.books.attempts:
                assert attempt.fate == "refused"

    @rule(
        parts=st.lists(
            st.tuples(KEY, st.integers(1, 5), APART), min_size=1, max_size=4, unique_by=lambda part: part[0]
        ),
        answered=st.booleans(),
    )
    def move(self, parts: list[tuple[bytes, int, int | None]], answered: bool) -> None:
        self.books.move([(key, count, self.expected(key, apart)) for key, count, apart in parts])
        if answered:
            self.books.run()

    @rule(key=KEY)
    def race(self, key: bytes) -> None:
        """Several expect the same version at the same time: at most one wins."""
        expected = self.expected(key, 0)
        attempts = [self.books.publish(key, 1, expected) for _ in range(3)]
        self.books.move([(key, 1, expected)])
        self.books.run()
        won = [one for one in (*attempts, *self.books.moves[-1].parts) if one.fate == "acknowledged"]
        assert len(won) <= 1

    @rule(armed=st.integers(1, 40), slow=st.booleans())
    def arm(self, armed: int, slow: bool) -> None:
        """The power goes off some operations later."""
        self.books.slow = self.books.bench.syncing_later = slow
        self.books.disk.crash_after(armed)

    @rule(how=st.sampled_from(["kept", "lost", "random", "restart"]))
    def end_the_broker(self, how: str) -> None:
        if how == "restart":
            self.books.restart()
        else:
            self.books.crash(Unsynced(how))

    @rule()
    def compact(self) -> None:
        self.books.compact_now()

    @rule()
    def look(self) -> None:
        self.books.check()


VersionsOnAFaultyDisk.TestCase.settings = settings(
    max_examples=int(os.environ.get("HEADRACE_MODEL_EXAMPLES", "100")) // 2, stateful_step_count=30
)
test_versions_on_a_faulty_disk = VersionsOnAFaultyDisk.TestCase


def story(books: VersionBooks) -> None:
    """Publishes, a repeated one, transactions, and a compaction."""
    for number in range(3):
        books.publish(b"ann", 2, 2 * number, numbered=True)
    books.run()
    books.move([(b"ann", 1, 6), (b"bob", 2, 0)])
    books.run()
    books.publish(b"ann", 1, 7)
    books.publish(b"ann", 1, None)
    books.run()
    books.move([(b"bob", 1, 2), (b"kim", 1, 0)])
    books.publish(b"bob", 1, 2)
    books.run()
    books.compact_now()
    books.publish(b"kim", 1, 1, numbered=True)
    books.run()


def operations_of_the_story(compact: bool) -> int:
    books = VersionBooks(compact=compact)
    before = books.disk.operations
    story(books)
    books.check()
    assert books.next_version(b"ann") == 9
    books.close()
    return books.disk.operations - before


@pytest.mark.parametrize("unsynced", [Unsynced.LOST, Unsynced.KEPT, Unsynced.RANDOM])
def test_the_power_goes_off_at_every_step(unsynced: Unsynced) -> None:
    for step in range(1, operations_of_the_story(compact=True) + 1, 1 if unsynced is Unsynced.RANDOM else 3):
        books = VersionBooks(step, compact=True)
        books.disk.crash_after(step)
        story(books)
        books.disk.crash_after(1 << 60)
        books.check()
        books.crash(unsynced)
        books.check()
        books.close()
