"""Where stories of leased subscriptions are played: a broker, and people who lease messages; values are names."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.leased_sight import contents

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Session
from headrace.model.batch import Columns, encode
from headrace.model.errors import HeadraceError
from headrace.model.leasing import (
    Ack,
    Edit,
    EditMatching,
    Extend,
    Find,
    Forecast,
    Holding,
    Lease,
    MessageChange,
    MessageId,
    Redrive,
    Reject,
    Release,
    Selection,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDescribe,
)
from headrace.model.message import Message
from headrace.model.request import Answer
from headrace.model.requests import Publish, TopicCreate
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import START_US, Workbench

SECOND_US = 1_000_000
Options = dict[str, str]
Held = tuple[int, int, int]
"""Partition, offset and token."""


class Stage:
    """A broker, and what everyone remembers of the messages they leased, whether they still have them or not."""

    def __init__(self, directory: Path) -> None:
        self.disk = FaultyDisk()
        self.directory = str(directory / "data")
        self.bench = Workbench(self.directory, disk=self.disk)
        self.sessions: dict[str, Session] = {}
        self.ids: dict[str, tuple[str, int, int]] = {}
        self.held: dict[tuple[str, str], Held] = {}
        self.waiting: list[tuple[str, PendingAnswer[Any]]] = []

    def __enter__(self) -> "Stage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bench.close()

    def play(self, event: str) -> Iterator[str]:
        """What comes of a line such as `lease alice jobs 2`."""
        word, *arguments = event.split()
        act: Callable[..., Iterator[str]] | None = getattr(self, f"do_{word}", None)
        assert act is not None, f"a story has no {word!r}"
        options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
        try:
            yield from act(options, *(argument for argument in arguments if "=" not in argument))
        except HeadraceError as error:
            yield f"refused, {error.code}"
        yield from self.answers()

    # Topics and subscriptions.

    def do_topic(self, options: Options, name: str) -> Iterator[str]:
        """`topic jobs partitions=2`."""
        self.bench.ask(TopicCreate(name, {"partitions": int(options.get("partitions", "1"))}))
        yield "made"

    def do_subscribe(self, options: Options, name: str, start: str = "earliest") -> Iterator[str]:
        """`subscribe jobs/urgent latest discipline=priority`; only `jobs` is its default subscription."""
        topic, subscription = named(name)
        self.bench.ask(SubscriptionCreate(topic, subscription, settings_of(options), start))
        yield "made"

    def do_alter(self, options: Options, name: str) -> Iterator[str]:
        """`alter jobs paused=true`."""
        topic, subscription = named(name)
        self.bench.ask(SubscriptionAlter(topic, settings_of(options), subscription))
        yield "changed"

    def do_publish(self, options: Options, topic: str, *values: str) -> Iterator[str]:
        """`publish jobs a b priority=5 due=10s expires=1m key=k owner=shop partition=1`."""
        count, now_us = len(values), self.bench.now_us
        headers = {"headrace-owner": options["owner"].encode()} if "owner" in options else None
        columns = Columns(
            [value.encode() for value in values],
            keys=[options["key"].encode()] * count if "key" in options else None,
            headers=[headers] * count if headers else None,
            dues=[now_us + microseconds(options["due"])] * count if "due" in options else None,
            priorities=[int(options["priority"])] * count if "priority" in options else None,
            expires=[now_us + microseconds(options["expires"])] * count if "expires" in options else None,
        )
        partition = int(options.get("partition", "0"))
        answer = self.bench.ask(Publish(topic, partition), encode(columns, now_us).data)
        for at, value in enumerate(values):
            self.ids[value] = topic, partition, answer.base_offset + at
            yield f"{value} is {topic}/{partition}/{answer.base_offset + at}"

    # Leases.

    def do_lease(self, options: Options, holder: str, name: str, messages: str = "1") -> Iterator[str]:
        """`lease alice jobs 2 for=10s ahead=1s wait=1m`."""
        topic, subscription = named(name)
        times = {field: microseconds(options[word]) // 1000 for word, field in LEASE_TIMES.items() if word in options}
        answer = self.bench.begin(Lease(topic, subscription, int(messages), **times), session=self.session(holder))
        self.bench.run()
        if isinstance(answer, PendingAnswer) and answer.outcome is None:
            self.waiting.append((holder, answer))
            yield f"{holder} waits"
        else:
            yield from self.leased(holder, answer.outcome if isinstance(answer, PendingAnswer) else answer)

    def do_ack(self, options: Options, holder: str, *values: str) -> Iterator[str]:
        """`ack alice a b`, under the tokens that she remembers; `with=bob`: under Bob's."""
        yield from self.settle(Ack, options, holder, values)

    def do_extend(self, options: Options, holder: str, *values: str) -> Iterator[str]:
        """`extend alice a for=10s`."""
        lease_ms = microseconds(options["for"]) // 1000 if "for" in options else 0
        yield from self.settle(Extend, options, holder, values, lease_ms=lease_ms)

    def do_release(self, options: Options, holder: str, *values: str) -> Iterator[str]:
        """`release alice a delay=5s reason=tired state=half`, or `until=20s`, or `undelivered=true`."""
        more: dict[str, Any] = {"reason": options.get("reason", ""), "undelivered": "undelivered" in options}
        if "delay" in options:
            more["delay_ms"] = microseconds(options["delay"]) // 1000
        if "until" in options:
            more["until_us"] = START_US + microseconds(options["until"])
        if "state" in options:
            more["states"] = {self.held[holder, value][1]: options["state"].encode() for value in values}
        yield from self.settle(Release, options, holder, values, **more)

    def do_reject(self, options: Options, holder: str, *values: str) -> Iterator[str]:
        """`reject alice a reason=unreadable`."""
        yield from self.settle(Reject, options, holder, values, reason=options.get("reason", ""))

    # Looking and changing.

    def do_show(self, options: Options, name: str) -> Iterator[str]:
        """`show jobs status=waiting`: what the subscription has."""
        topic, subscription = named(name)
        for one, message in self.find(topic, subscription, options.get("status", "")):
            line = f"{text(message)} is {one.status}"
            line += f" from {shown(one.ready_us)} on" if one.status == "waiting" else ""
            line += f" by {one.holder} until {shown(one.until_us)}" if one.status == "leased" else ""
            line += f", delivered {one.deliveries} times" if one.deliveries else ""
            line += f", version {one.version}" if one.version > 1 else ""
            yield line + (f", because {one.reason}" if one.reason else "")
        info = self.bench.ask(SubscriptionDescribe(topic, subscription))
        counts = ((info.waiting, "waiting"), (info.ready, "ready"), (info.leased, "leased"), (info.dead, "dead"))
        yield ", ".join(f"{count} {what}" for count, what in counts)

    def do_dead(self, _: Options, topic: str) -> Iterator[str]:
        """`dead jobs.dead`: what is in a dead letter topic, and what its headers say."""
        for batch in self.bench.batches(topic):
            for message in batch.messages():
                headers = {name: value.decode() for name, value in (message.headers or {}).items()}
                said = {name.removeprefix("headrace-dead-"): value for name, value in headers.items()}
                place = f"{said['topic']}/{said['partition']}/{said['offset']}"
                yield f"{text(message)} of {place}, subscription {said['subscription']}: {said['reason']}"
                yield f"    at {shown(int(said['time']))} after {said['deliveries']} deliveries"
                for one in json.loads(said["history"]):
                    yield f"    {one['holder'] or 'nobody'} at {shown(one['time'])}: {one['reason']}"

    def do_redrive(self, options: Options, name: str, *values: str) -> Iterator[str]:
        """`redrive jobs`: all, or only some."""
        topic, subscription = named(name)
        chosen = []
        if values:
            dead = self.find(topic, subscription, "dead")
            chosen = [MessageId(one.partition, one.offset) for one, message in dead if text(message) in values]
        most = int(options.get("most", "1000"))
        answer = self.bench.ask(Redrive(topic, subscription, Selection(messages=chosen), most))
        yield f"{answer.messages} redriven" + (", there are more" if answer.more else "")

    def do_move(self, options: Options, value: str, time: str) -> Iterator[str]:
        """`move a 20s version=1 owner=shop`."""
        yield from self.edit(options, value, MessageChange(due_us=START_US + microseconds(time)))

    def do_priority(self, options: Options, value: str, priority: str) -> Iterator[str]:
        """`priority a 9`."""
        yield from self.edit(options, value, MessageChange(priority=int(priority)))

    def do_replace(self, options: Options, value: str, new: str) -> Iterator[str]:
        """`replace a b`: from now on it says b."""
        yield from self.edit(options, value, MessageChange(replace=True), new)
        self.ids[new] = self.ids[value]

    def do_delete(self, options: Options, value: str) -> Iterator[str]:
        """`delete a`."""
        yield from self.edit(options, value, MessageChange(delete=True))

    def do_shift(self, options: Options, name: str, by: str) -> Iterator[str]:
        """`shift reminders 1h key=k owner=shop status=waiting`: move all that match."""
        topic, subscription = named(name)
        key = options["key"].encode() if "key" in options else None
        selection = Selection(status=options.get("status", ""), key=key, owner=options.get("whose", ""))
        change = MessageChange(shift_us=microseconds(by))
        answer = self.bench.ask(EditMatching(topic, selection, change, subscription, options.get("owner", "")))
        yield from (self.outcome(topic, one) for one in answer.outcomes)

    def do_forecast(self, _: Options, name: str, bucket: str, buckets: str) -> Iterator[str]:
        """`forecast reminders 10s 3`: three times ten seconds from now on."""
        topic, subscription = named(name)
        answer = self.bench.ask(
            Forecast(topic, self.bench.now_us, microseconds(bucket), int(buckets), subscription=subscription)
        )
        yield f"{answer.before} before, {' '.join(map(str, answer.counts))}, {answer.after} after"

    # Time, and the broker's ends.

    def do_wait(self, _: Options, time: str) -> Iterator[str]:
        """`wait 10s`: the broker is woken when it wishes to be."""
        end_us = self.bench.now_us + microseconds(time)
        while self.bench.now_us < end_us:
            due_us = self.bench.broker.tick(self.bench.now_us)
            self.bench.now_us = min(end_us, max(due_us, self.bench.now_us + 1))
            self.bench.tick()
            yield from self.answers()
        yield f"it is {shown(end_us)}"

    def do_restart(self, _: Options) -> Iterator[str]:
        """`restart`: in an orderly way."""
        self.bench.close()
        yield from self.begin_anew()

    def do_kill(self, options: Options) -> Iterator[str]:
        """`kill away=10s`: what the broker has written is there when it comes back."""
        self.bench.now_us += microseconds(options.get("away", "0s"))
        yield from self.begin_anew()

    def do_blackout(self, _: Options) -> Iterator[str]:
        """`blackout`: only what was synced is there."""
        self.disk.power_loss(Unsynced.LOST)
        yield from self.begin_anew()

    def begin_anew(self) -> Iterator[str]:
        self.bench = Workbench(self.directory, disk=self.disk, now_us=self.bench.now_us)
        self.bench.tick()
        self.sessions.clear()
        self.waiting.clear()
        yield "the broker is back"

    # What they share.

    def session(self, name: str) -> Session:
        if name not in self.sessions:
            self.sessions[name] = self.bench.connect(name)
        return self.sessions[name]

    def find(self, topic: str, subscription: str, status: str) -> list[tuple[Any, Message]]:
        answer = self.bench.ask(Find(topic, Selection(status=status), subscription))
        words, body = answer if isinstance(answer, AnswerWithBody) else (answer, b"")
        return list(zip(words.messages, contents(body), strict=True))

    def answers(self) -> Iterator[str]:
        """Those who waited, and have an answer now."""
        for holder, later in list(self.waiting):
            if later.outcome is not None:
                self.waiting.remove((holder, later))
                yield f"at {shown(self.bench.now_us)}"
                yield from self.leased(holder, later.outcome)

    def leased(self, holder: str, answer: Any) -> Iterator[str]:
        if isinstance(answer, HeadraceError):
            raise answer
        words, body = answer if isinstance(answer, AnswerWithBody) else (answer, b"")
        messages = contents(body)
        for portion in words.portions:
            versions = portion.versions or [1] * len(portion.all_offsets)
            deliveries = portion.deliveries or [1] * len(portion.all_offsets)
            for offset, version, times in zip(portion.all_offsets, versions, deliveries, strict=True):
                value = text(messages.pop(0))
                self.held[holder, value] = portion.partition, offset, portion.lease
                line = f"{holder} gets {value}, until {shown(portion.until_us)}"
                line += f", delivery {times}" if times > 1 else ""
                line += f", version {version}" if version > 1 else ""
                yield line + (f", left: {portion.states[offset].decode()}" if offset in portion.states else "")
        if not words.portions:
            yield f"nothing for {holder}"

    def settle(
        self, kind: type[Answer], options: Options, holder: str, values: tuple[str, ...], **more: Any
    ) -> Iterator[str]:
        topic, subscription = named(options.get("in", self.ids[values[0]][0]))
        whose = options.get("with", holder)
        values = tuple(value for value in values if (whose, value) in self.held)
        held = [self.held[whose, value] for value in values]
        holdings = [Holding(partition, token, [offset]) for partition, offset, token in held]
        request = kind(topic=topic, holdings=holdings, subscription=subscription, **more)
        answer = self.bench.ask(request, session=self.session(holder))
        refused = {(one.partition, one.offset): one.code for one in answer.refused}
        for value, (partition, offset, _) in zip(values, held, strict=True):
            said = refused.pop(
                (partition, offset), f"done{f', until {shown(answer.until_us)}' if answer.until_us else ''}"
            )
            yield f"{value}: {said}"
        assert not refused, refused

    def edit(self, options: Options, value: str, change: MessageChange, new: str = "") -> Iterator[str]:
        topic, partition, offset = self.ids[value]
        version = int(options["version"]) if "version" in options else None
        body = encode(Columns([new.encode()]), self.bench.now_us).data if new else b""
        request = Edit(topic, [MessageId(partition, offset, version)], change, options.get("owner", ""))
        yield from (self.outcome(topic, one) for one in self.bench.ask(request, body).outcomes)

    def outcome(self, topic: str, one: Any) -> str:
        value = next(name for name, at in self.ids.items() if at == (topic, one.partition, one.offset))
        line = f"{value}: {one.outcome}"
        line += f", version {one.version}" if one.version and one.outcome in ("applied", "stale_version") else ""
        return line + (f", by {one.holder}" if one.holder else "")


LEASE_TIMES = {"for": "lease_ms", "ahead": "ahead_ms", "wait": "wait_ms"}


def named(text: str) -> tuple[str, str]:
    """The topic and the subscription that `jobs/urgent` names."""
    topic, _, subscription = text.partition("/")
    return topic, subscription or "default"


def settings_of(options: Options) -> dict[str, Any]:
    """Settings of a subscription; delays are never longer or shorter by chance."""
    plain: dict[str, Any] = {"retry_jitter": 0}
    for name, value in options.items():
        plain[name] = json.loads(value) if value in ("true", "false") or value[0].isdigit() else value
    return plain


def text(message: Message) -> str:
    """What a message says."""
    return (message.value or b"").decode()


def microseconds(text: str) -> int:
    """How long `2.5s`, `10m` or `1h` is."""
    return round(float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]] * SECOND_US)


def shown(time_us: int) -> str:
    """A time, as seconds since the story began."""
    return f"{(time_us - START_US) / SECOND_US:g}s"
