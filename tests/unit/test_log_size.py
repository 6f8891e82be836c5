"""The size of the log behind a position, which owners and followers add up together."""

from headrace.storage.replicated.keys import Position
from headrace.storage.replicated.log_size import PART_BYTES, LogSize


def test_what_follows_a_position_is_counted() -> None:
    size = LogSize()
    for number in range(1, 6):
        size.add(Position(1, number), PART_BYTES)
    size.add(Position(2, 3), 7)
    assert size.behind(Position(1, 0)) == 5 * PART_BYTES + 7
    assert size.behind(Position(1, 4)) == PART_BYTES + 7
    assert size.behind(Position(2, 0)) == 7
    assert size.behind(Position(2, 3)) == 0


def test_small_objects_are_counted_in_parts() -> None:
    size = LogSize()
    for number in range(1, 1001):
        size.add(Position(1, number), PART_BYTES // 100)
    assert len(size.parts) <= 11
    exactly = 300 * (PART_BYTES // 100)
    assert exactly <= size.behind(Position(1, 700)) <= exactly + PART_BYTES


def test_another_process_goes_on_with_the_parts() -> None:
    size = LogSize()
    size.add(Position(1, 5), 100)
    again = LogSize(size.parts)
    again.add(Position(2, 1), 50)
    assert again.behind(Position(1, 0)) == 150


def test_the_oldest_parts_are_forgotten() -> None:
    size = LogSize()
    for number in range(5000):
        size.add(Position(1, number), PART_BYTES)
    assert len(size.parts) <= 1024
    assert size.behind(Position(1, 0)) >= 16 << 30
