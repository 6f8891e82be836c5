"""A worker without a thread, so that a test's run repeats exactly."""

from collections.abc import Callable

from headrace.storage.worker import Worker


class InlineWorker(Worker):
    """Does each job at once, in the thread of who submits it."""

    def __init__(self) -> None:
        super().__init__("inline")

    def submit(self, job: Callable[[], None]) -> None:
        """Do the job."""
        job()
