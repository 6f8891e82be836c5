"""All who wait for a log's sync are in one list, by offset, whatever order they come in."""

from collections.abc import Callable

from headrace.broker.sync_waiters import SyncWaiters
from headrace.model.errors import HeadraceError, LogFailed
from headrace.testing.workbench import Workbench

Tell = Callable[[HeadraceError | None], None]


class Log:
    """A log whose disk is asked and answers when the test says so."""

    def __init__(self) -> None:
        self.synced_offset = 0
        self.is_small_backlog = False
        self.overlaps_syncs = False
        self.requested = 0
        self.asked: list[tuple[int, Tell]] = []

    def when_synced(self, offset: int, tell: Tell) -> None:
        self.asked.append((offset, tell))

    def request_sync(self) -> None:
        self.requested += 1

    def sync(self, offset: int, error: HeadraceError | None = None) -> None:
        self.synced_offset = offset
        self.asked.pop(0)[1](error)


def test_one_question_at_a_time_for_all_who_wait() -> None:
    bench, log, told = Workbench(), Log(), []
    waiters = SyncWaiters(log, bench)
    for offset in (5, 9, 7, 7):  # a repeated batch waits for an earlier offset than the one before it
        waiters.wait(offset, lambda _, offset=offset: told.append(offset))  # type: ignore[misc]
    assert [offset for offset, _ in log.asked] == [5]
    log.sync(7)
    bench.run()
    assert told == [5, 7, 7]
    assert [offset for offset, _ in log.asked] == [9]
    log.sync(9)
    bench.run()
    assert told == [5, 7, 7, 9]
    assert waiters.idle


def test_a_sync_that_fails_is_told_to_all_who_wait() -> None:
    bench, log = Workbench(), Log()
    waiters = SyncWaiters(log, bench)
    told: list[HeadraceError | None] = []
    for offset in range(1, 40):
        waiters.wait(offset, told.append)
    log.sync(0, LogFailed())
    bench.run()
    assert [type(error) for error in told] == [LogFailed] * 39
    assert waiters.idle


def test_a_log_that_overlaps_syncs_is_asked_for_the_first_and_syncs_the_others_meanwhile() -> None:
    bench, log, told = Workbench(), Log(), []
    log.overlaps_syncs = True
    waiters = SyncWaiters(log, bench)
    for offset in (5, 7, 9):
        waiters.wait(offset, lambda _, offset=offset: told.append(offset))  # type: ignore[misc]
    bench.run()
    assert [offset for offset, _ in log.asked] == [5]
    assert log.requested == 1
    log.sync(7)
    bench.run()
    assert told == [5, 7]
    assert [offset for offset, _ in log.asked] == [9]
    log.sync(9)
    bench.run()
    assert told == [5, 7, 9]
    waiters.wait(11, lambda _: told.append(11))
    bench.run()
    assert (log.requested, [offset for offset, _ in log.asked]) == (1, [11])
