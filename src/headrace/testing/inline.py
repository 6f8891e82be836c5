"""A worker without a thread, so that test runs repeat exactly."""

from collections.abc import Callable

from headrace.storage.worker import Worker


class InlineWorker(Worker):
    """Runs each job at once, on the thread that submits it."""

    def __init__(self) -> None:
        super().__init__("inline")

    def submit(self, job: Callable[[], None]) -> None:
        """Run the job."""
        job()
