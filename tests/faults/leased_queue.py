"""A leased subscription spoken to in a few words."""

from pathlib import Path
from typing import Any

from tests.faults.leased_sight import contents

from headrace.broker.pending_answer import AnswerWithBody
from headrace.broker.settings import BrokerSettings
from headrace.model.batch import Columns, encode
from headrace.model.leasing import (
    Edit,
    Find,
    Holding,
    Lease,
    MessageChange,
    MessageId,
    Selection,
    SubscriptionCreate,
    SubscriptionDescribe,
)
from headrace.model.requests import Publish, TopicCreate
from headrace.testing import FaultyDisk
from headrace.testing.workbench import START_US, Workbench

SECOND_US = 1_000_000


class Queue:
    """The default subscription of the topic `jobs`, spoken to in a few words."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = str(directory / "data")
        self.disk = FaultyDisk()
        self.broker_settings = BrokerSettings(journal_bytes=settings.pop("journal_bytes", 300))
        self.bench = self.started(START_US)
        self.bench.ask(TopicCreate("jobs", {"partitions": settings.pop("partitions", 1)}))
        self.bench.ask(SubscriptionCreate("jobs", settings={"retry_jitter": 0, **settings}))

    def started(self, now_us: int) -> Workbench:
        return Workbench(self.directory, disk=self.disk, settings=self.broker_settings, now_us=now_us)

    def restart(self) -> None:
        """The broker dies, and comes back."""
        self.bench = self.started(self.bench.now_us)
        self.bench.tick()

    def publish(self, *values: str, partition: int = 0, **columns: Any) -> None:
        """Publish messages that share all but their values; times are seconds from now."""
        for name in ("dues", "expires"):
            if name in columns:
                columns[name] = self.bench.now_us + round(columns[name] * SECOND_US)
        shared = {name: [value] * len(values) for name, value in columns.items()}
        made = encode(Columns([value.encode() for value in values], **shared), self.bench.now_us)
        self.bench.ask(Publish("jobs", partition), made.data)

    def lease(self, most: int = 1, subscription: str = "default", **more: Any) -> dict[str, Any]:
        """Lease messages: values to what is held, with the time when the lease ends."""
        words, body = parts(self.bench.ask(Lease("jobs", subscription, most, **more)))
        held, reads = {}, contents(body)
        for portion in words.portions:
            for offset in portion.all_offsets:
                value = (reads.pop(0).value or b"").decode()
                held[value] = Holding(portion.partition, portion.lease, [offset]), portion.until_us
        return held

    def settle(self, kind: Any, *held: Any, **more: Any) -> list[str]:
        """What is refused, and why."""
        answer = self.bench.ask(kind("jobs", [holding for holding, _ in held], **more))
        return [one.code for one in answer.refused]

    def find(self, status: str = "", subscription: str = "default", **selection: Any) -> dict[str, Any]:
        """Values to what is said about them."""
        answer = self.bench.ask(Find("jobs", Selection(status=status, **selection), subscription))
        words, body = parts(answer)
        reads = contents(body)
        return {(read.value or b"").decode(): one for one, read in zip(words.messages, reads, strict=True)}

    def edit(self, offset: int, **change: Any) -> str:
        """Change a message of the first partition."""
        answer = self.bench.ask(Edit("jobs", [MessageId(0, offset)], MessageChange(**change)))
        return str(answer.outcomes[0].outcome)

    def info(self, subscription: str = "default") -> Any:
        return self.bench.ask(SubscriptionDescribe("jobs", subscription))

    def in_seconds(self, seconds: float) -> int:
        return self.bench.now_us + round(seconds * SECOND_US)


def parts(answer: Any) -> tuple[Any, Any]:
    """The words and the body of an answer."""
    return answer if isinstance(answer, AnswerWithBody) else (answer, b"")
