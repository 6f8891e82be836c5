"""What a background thread says of jobs that fail."""

import logging
import threading

import pytest

from headrace.model.errors import Closed, DiskFailed, Fenced, HeadraceError, StoreUnavailable
from headrace.storage.worker import Worker


def records_of(error: HeadraceError, caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What is logged when a job fails, after which the next one runs."""
    ran = threading.Event()

    def fail() -> None:
        raise error

    worker = Worker("test")
    with caplog.at_level(logging.INFO):
        worker.submit(fail)
        worker.submit(ran.set)
        assert ran.wait(10)
        worker.stop()
    return caplog.records


@pytest.mark.parametrize("error", [Fenced("it is over"), StoreUnavailable("no answer"), Closed("closed")])
def test_a_job_that_meets_a_lost_shard_is_one_line(error: HeadraceError, caplog: pytest.LogCaptureFixture) -> None:
    [record] = records_of(error, caplog)
    assert (record.levelname, record.exc_info) == ("INFO", None)
    assert str(error) in record.getMessage()


def test_another_failure_is_an_error_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    [record] = records_of(DiskFailed("gone"), caplog)
    assert record.levelname == "ERROR"
    assert record.exc_info
