"""Messages pass through the middleware of their topic when they are delivered, on every exit."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from headrace.broker.pending_answer import AnswerWithBody
from headrace.middleware import ERROR_HEADER, Columns, Middleware, MiddlewareContext
from headrace.model.batch import Batch, parse
from headrace.model.errors import InvalidArgument
from headrace.model.key_versions import History
from headrace.model.leasing import (
    Edit,
    Find,
    Holding,
    Lease,
    MessageChange,
    MessageId,
    Reject,
    SubscriptionCreate,
)
from headrace.model.reading import Fetch
from headrace.model.requests import Publish, TopicAlter, TopicCreate
from headrace.model.standing_lease import LeaseOpen
from headrace.testing.memory_disk import MemoryDisk
from headrace.testing.workbench import Workbench

REDACT = {"name": "redact", "fields": ["$.card"], "headers": ["secret"], "when": "deliver"}
CARD, HIDDEN, OTHER = b'{"card":"4111"}', b'{"card":"***"}', b'{"id":2}'


def bench_with(*entries: dict[str, Any], **settings: Any) -> Workbench:
    bench = Workbench(middleware={"fussy": Fussy, "upper": Upper})
    bench.ask(TopicCreate("orders", {"middleware": list(entries), **settings}))
    return bench


class Fussy(Middleware):
    """Fails for values that begin with x."""

    inline = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._wrong = options.get("wrong", "raise")
        self.inline = options.get("inline", True)

    def on_deliver(self, columns: Columns, _: MiddlewareContext) -> Columns:
        if any((value or b"").startswith(b"x") for value in columns.values):
            if self._wrong == "raise":
                raise ValueError("secret")
            return Columns([*columns.values, b"more"])
        return columns


class Upper(Middleware):
    """Makes values upper case, and tries to change keys."""

    inline = True
    needs = ("values", "keys")

    def __init__(self, _: Mapping[str, Any]) -> None:
        pass

    def on_deliver(self, columns: Columns, _: MiddlewareContext) -> Columns:
        values = [(value or b"").upper() for value in columns.values]
        return msgspec.structs.replace(columns, values=values, keys=[b"other"] * len(values))


def batches_of(body: Any) -> list[Batch]:
    view, position, found = memoryview(body), 0, []
    while position < len(view):
        batch = parse(view, position)
        batch.verify()
        found.append(batch)
        position += batch.length
    return found


def body_values(answer: Any) -> list[bytes | None]:
    assert isinstance(answer, AnswerWithBody)
    return [value for batch in batches_of(answer.body) for value in batch.columns().values]


def test_every_exit_delivers_what_middleware_leaves() -> None:
    bench = bench_with(REDACT)
    headers = [{"secret": b"1", "open": b"2"}, None]
    bench.ask(Publish("orders", 0), bench.batch([CARD, OTHER], headers=headers).data)
    bench.ask(SubscriptionCreate("orders"))
    assert bench.values("orders") == [HIDDEN, OTHER]
    assert bench.batches("orders")[0].columns().headers == [{"secret": b"***", "open": b"2"}, None]
    assert body_values(bench.ask(Fetch("orders", 0, 0))) == [HIDDEN, OTHER]
    assert body_values(bench.ask(Find("orders"))) == [HIDDEN, OTHER]
    assert body_values(bench.ask(Lease("orders", messages_max=1))) == [HIDDEN]
    bench.ask(LeaseOpen("orders", credit_messages=10))
    bench.run()
    (pushed,) = [one for one in bench.pushed if isinstance(one, AnswerWithBody)]
    assert body_values(pushed) == [OTHER]
    stored = bench.broker._topics.active(bench.broker._topics.get("orders"), 0).partition
    assert stored.batch_at(0).columns().values == [CARD, OTHER]


def test_leased_consumers_see_large_batches_transformed() -> None:
    bench = bench_with(REDACT)
    bench.ask(SubscriptionCreate("orders"))
    bench.publish("orders", [CARD] * 3000)
    values = body_values(bench.ask(Lease("orders", messages_max=3000)))
    assert values == [HIDDEN] * 3000
    messages = [one for batch in bench.batches("orders") for one in batch.messages()]
    assert [one.offset for one in messages] == list(range(3000))
    assert {one.value for one in messages} == {HIDDEN}


def test_history_of_a_key_is_delivered_too() -> None:
    bench = bench_with(REDACT, key_versions=True)
    bench.ask(Publish("orders", 0), bench.batch([CARD], keys=[b"k"]).data)
    assert body_values(bench.ask(History("orders", b"k"))) == [HIDDEN]


def test_edited_contents_are_delivered_like_others() -> None:
    bench = bench_with(REDACT)
    bench.ask(SubscriptionCreate("orders"))
    bench.publish("orders", [OTHER, OTHER])
    edited = bench.batch([b'{"card":"new"}'])
    bench.ask(Edit("orders", [MessageId(0, 0)], MessageChange(replace=True)), edited.data)
    assert body_values(bench.ask(Lease("orders", messages_max=2))) == [HIDDEN, OTHER]


def test_dead_letters_of_consumers_have_what_was_delivered() -> None:
    bench = bench_with(REDACT)
    bench.ask(SubscriptionCreate("orders"))
    bench.publish("orders", [CARD])
    leased = bench.ask(Lease("orders", messages_max=1)).answer
    bench.ask(Reject("orders", [Holding(0, leased.portions[0].lease, [0])], reason="no"))
    assert bench.values("orders.dead") == [HIDDEN]


@pytest.mark.parametrize("wrong", ["raise", "count"])
def test_a_message_for_which_middleware_fails_is_delivered_without_its_value(
    wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = bench_with({"name": "fussy", "wrong": wrong})
    headers = [{"a": b"1"}] * 3
    bench.ask(Publish("orders", 0), bench.batch([b"a", b"x-secret", b"c"], headers=headers, keys=[b"k"] * 3).data)
    messages = [one for batch in bench.batches("orders") for one in batch.messages()]
    assert [(one.offset, one.value, one.key) for one in messages] == [(0, b"a", b"k"), (1, None, b"k"), (2, b"c", b"k")]
    assert messages[1].headers == {ERROR_HEADER: b"fussy"}
    assert messages[0].headers == {"a": b"1"}
    assert len([one for one in caplog.records if "middleware failed" in one.getMessage()]) == 1
    assert "secret" not in caplog.text
    assert "messages are delivered without their values" in caplog.text
    assert "nothing was stored" not in caplog.text


def test_values_that_redaction_cannot_read_are_hidden() -> None:
    bench = bench_with(REDACT)
    bench.publish("orders", [b"card 4111", CARD])
    messages = [one for batch in bench.batches("orders") for one in batch.messages()]
    assert [one.value for one in messages] == [None, HIDDEN]
    assert messages[0].headers == {ERROR_HEADER: b"redact"}


def test_only_values_and_headers_change() -> None:
    bench = bench_with({"name": "upper"})
    bench.ask(Publish("orders", 0), bench.batch([b"a"], keys=[b"k"]).data)
    (message,) = [one for batch in bench.batches("orders") for one in batch.messages()]
    assert (message.value, message.key) == (b"A", b"k")


def test_altered_middleware_counts_for_what_is_open() -> None:
    bench = bench_with()
    bench.ask(SubscriptionCreate("orders"))
    bench.publish("orders", [CARD, CARD, CARD])
    assert body_values(bench.ask(Lease("orders", messages_max=1))) == [CARD]
    assert bench.values("orders") == [CARD] * 3
    assert body_values(bench.ask(Find("orders"))) == [CARD] * 3
    bench.ask(TopicAlter("orders", {"middleware": [REDACT]}))
    assert body_values(bench.ask(Lease("orders", messages_max=1))) == [HIDDEN]
    assert bench.values("orders") == [HIDDEN] * 3
    assert body_values(bench.ask(Find("orders"))) == [HIDDEN] * 3
    bench.ask(TopicAlter("orders", {"middleware": [{**REDACT, "replacement": 0}]}))
    assert body_values(bench.ask(Lease("orders", messages_max=1))) == [b'{"card":0}']
    bench.ask(TopicAlter("orders", {"middleware": []}))
    assert bench.values("orders") == [CARD] * 3


def test_it_is_there_after_a_restart() -> None:
    disk = MemoryDisk()
    bench = Workbench("/data", disk=disk)
    bench.ask(TopicCreate("orders", {"middleware": [REDACT]}))
    bench.publish("orders", [CARD])
    bench.close()
    bench = Workbench("/data", disk=disk)
    assert bench.values("orders") == [HIDDEN]


def test_publish_and_delivery_go_together() -> None:
    entries = [
        {"name": "transform", "from": "json", "to": "msgpack"},
        {"name": "transform", "from": "msgpack", "to": "json", "when": "deliver"},
    ]
    bench = bench_with(*entries)
    bench.publish("orders", [b'{"id": 1}'])
    assert bench.values("orders") == [b'{"id":1}']


def test_middleware_that_may_wait_cannot_deliver() -> None:
    with pytest.raises(InvalidArgument, match="cannot wait for a thread"):
        bench_with({"name": "fussy", "inline": False})


def test_a_message_that_grows_is_delivered_in_parts() -> None:
    class Grow(Fussy):
        def on_deliver(self, columns: Columns, _: MiddlewareContext) -> Columns:
            return msgspec.structs.replace(columns, values=[b"y" * (1 << 20)] * len(columns.values))

    bench = Workbench(middleware={"grow": Grow})
    bench.ask(TopicCreate("orders", {"middleware": [{"name": "grow"}]}))
    bench.publish("orders", [b"1"] * 20)
    assert [len(value or b"") for value in bench.values("orders")] == [1 << 20] * 20
