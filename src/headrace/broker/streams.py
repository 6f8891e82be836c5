"""A stream: one reader's way through a partition."""

from collections.abc import Callable

from headrace.broker.active_partition import ActivePartition
from headrace.engines.api import Slice, as_headrace_error


class Stream:
    """Reads a partition from an offset on. When there is nothing it asks to be told."""

    def __init__(self, active: ActivePartition, topic_id: int, offset: int, on_ready: Callable[[], None]) -> None:
        active.check_offset(offset)
        self.topic_id = topic_id
        self.first_offset = active.partition.first_offset
        self.end_offset = active.end_offset
        self._active = active
        self._offset = offset
        self._on_ready = on_ready

    def read(self, bytes_max: int, now_us: int) -> Slice | None:
        """Whole batches, at least one; None when there is none now, and `on_ready` is called once when there is.

        An error that this raises is the end of the stream.
        """
        try:
            found = self._active.read(self._offset, bytes_max, now_us, self._on_ready)
        except OSError as error:
            raise as_headrace_error(error) from error
        if found is not None:
            self._offset = found.next_offset
        return found

    def listen(self) -> None:
        """Have `on_ready` called once when there may be more, after all that there was has been read."""
        self._active.listen(self._on_ready)

    def close(self) -> None:
        """Do not call `on_ready` any more."""
        self._active.forget(self._on_ready)
