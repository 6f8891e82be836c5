"""Deserializing leased messages: one that cannot be is given back, and in the end becomes a dead letter."""

import logging
import traceback

import msgspec

from headrace.client.leasing.jobs import Job
from headrace.client.producer.serializing import CannotDeserialize, Deserializer

logger = logging.getLogger("headrace.client")


class JobDeserializer:
    """Makes the bytes of leased messages into the values that the program wants."""

    def __init__(self, deserializer: Deserializer | None) -> None:
        self._deserializer = deserializer

    def opened(self, job: Job) -> Job | str:
        """The message with its value, or why there is none."""
        if self._deserializer is None or job.value is None:
            return job
        try:
            value = self._deserializer(job.value)
        except Exception as reason:  # noqa: BLE001  # whatever a message does to a deserializer must not end the program
            error = CannotDeserialize(job.topic, job.partition, job.offset, reason, job)
            logger.warning("given back: %s", error)
            return told(reason)
        return msgspec.structs.replace(job, value=value)

    def opened_all(self, jobs: list[Job]) -> tuple[list[Job], list[tuple[Job, str]]]:
        """The messages with their values, and those that have none, with the reasons."""
        if self._deserializer is None:
            return jobs, []
        opened = [(job, self.opened(job)) for job in jobs]
        return (
            [made for _, made in opened if isinstance(made, Job)],
            [(job, made) for job, made in opened if isinstance(made, str)],
        )


def told(error: BaseException) -> str:
    """An error as text, with where it came from."""
    return "".join(traceback.format_exception(error))
