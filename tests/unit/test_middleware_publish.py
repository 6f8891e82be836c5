"""Published batches pass through the middleware of their topic."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from headrace.broker.pending_answer import PendingAnswer
from headrace.middleware import Columns, Middleware, MiddlewareContext, RefusedMessages
from headrace.model.batch import Producer
from headrace.model.bus_event import EventsRecord
from headrace.model.errors import (
    Busy,
    HeadraceError,
    InvalidArgument,
    MessageRefused,
    MessageTooLarge,
    MiddlewareFailed,
    MiddlewareTimeout,
    OutOfOrderSequence,
    PluginUnavailable,
    TopicFailed,
    UnexpectedOffset,
)
from headrace.model.limits import MIDDLEWARE_STUCK_MAX
from headrace.model.requests import (
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDescribe,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.model.schedule_requests import ScheduleDefinition, ScheduleList, ScheduleRun, ScheduleSet
from headrace.testing.memory_disk import MemoryDisk
from headrace.testing.workbench import Workbench

SCHEMA = {"name": "schema", "schema": {"type": "object", "required": ["id"]}}
DEAD = {**SCHEMA, "on_invalid": "dead_letter"}
GOOD, OTHER, BAD = b'{"id":1}', b'{"id":2}', b'{"no":1}'


class Suffix(Middleware):
    """Adds a text to each value."""

    inline = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._text = str(options["text"]).encode()
        self.inline = bool(options.get("inline", True))

    def on_publish(self, columns: Columns, _: MiddlewareContext) -> Columns:
        return msgspec.structs.replace(columns, values=[(value or b"") + self._text for value in columns.values])


def calls(on_publish: Callable[[Columns, MiddlewareContext], Any], **traits: Any) -> Callable[..., Middleware]:
    """A factory of middleware that calls a function."""

    def make(_: Mapping[str, Any]) -> Middleware:
        made = Middleware()
        made.inline = True
        for name, trait in {"on_publish": on_publish, **traits}.items():
            setattr(made, name, trait)
        return made

    return make


def bench_with(*entries: dict[str, Any], settings: dict[str, Any] | None = None, **middleware: Any) -> Workbench:
    bench = Workbench(middleware={"suffix": Suffix, **middleware})
    bench.ask(TopicCreate("orders", {"middleware": list(entries), **(settings or {})}))
    return bench


def dead(bench: Workbench, topic: str = "orders.dead") -> list[tuple[bytes | None, bytes | None]]:
    """The dead letters: values and reasons."""
    if bench.broker._topics.find(topic) is None:
        return []
    found = []
    for batch in bench.batches(topic):
        columns = batch.columns()
        assert columns.headers is not None
        found += [
            (value, (headers or {})["headrace-dead-reason"])
            for value, headers in zip(columns.values, columns.headers, strict=True)
        ]
    return found


def test_middleware_runs_in_the_order_of_the_topic() -> None:
    bench = bench_with({"name": "suffix", "text": "-a"}, {"name": "suffix", "text": "-b"})
    bench.publish("orders", [b"1", b"2"])
    bench.ask(TopicAlter("orders", {"middleware": [{"name": "suffix", "text": "-c"}]}))
    bench.publish("orders", [b"3"])
    bench.ask(TopicAlter("orders", {"middleware": []}))
    bench.publish("orders", [b"4"])
    assert bench.values("orders") == [b"1-a-b", b"2-a-b", b"3-c", b"4"]
    assert bench.ask(TopicDescribe("orders")).settings["middleware"] == []


def test_unknown_middleware_and_wrong_options_refuse_the_topic() -> None:
    bench = Workbench()
    for entries, error, text in (
        ([{"name": "nothing"}], PluginUnavailable, "there is no plug-in 'nothing'"),
        ([{"name": "compress", "level": 3}], InvalidArgument, "compress: there is no option 'level'"),
        ([{"name": "schema"}], InvalidArgument, "give the option 'schema'"),
        ([{"options": 1}], InvalidArgument, "object with a name"),
        (["compress"], InvalidArgument, "settings are wrong"),
        ([{"name": "compress"}] * 17, InvalidArgument, "at most 16"),
        ([{"name": "schema", "schema": {"const": "x" * 70_000}}], InvalidArgument, "at most 65536 bytes"),
        ([{"name": "transform", "from": "xml", "to": "json"}], InvalidArgument, "cannot transform"),
    ):
        with pytest.raises(error, match=text):
            bench.ask(TopicCreate("orders", {"middleware": entries}))
    assert bench.broker._topics.find("orders") is None
    bench.publish("orders", [b"1"])
    with pytest.raises(PluginUnavailable):
        bench.ask(TopicAlter("orders", {"middleware": [{"name": "nothing"}]}))
    bench.publish("orders", [b"2"])
    assert bench.values("orders") == [b"1", b"2"]


def test_a_topic_whose_middleware_is_gone_is_isolated() -> None:
    disk = MemoryDisk()
    bench = Workbench("/data", disk=disk, middleware={"suffix": Suffix})
    bench.ask(TopicCreate("orders", {"middleware": [{"name": "suffix", "text": "!"}]}))
    bench.publish("orders", [b"1"])
    bench.publish("others", [b"1"])
    bench.close()
    bench = Workbench("/data", disk=disk)
    for request, body in ((Publish("orders", 0), bench.batch([b"2"]).data), (TopicDescribe("orders"), b"")):
        if isinstance(request, Publish):
            with pytest.raises(TopicFailed, match="no plug-in 'suffix'"):
                bench.ask(request, body)
        else:
            assert "suffix" in bench.ask(request).error
    with pytest.raises(TopicFailed):
        bench.values("orders")
    assert bench.values("others") == [b"1"]
    bench.ask(TopicAlter("orders", {"middleware": []}))
    assert bench.values("orders") == [b"1!"]
    bench.close()


def test_invalid_messages_refuse_their_batch_and_are_named() -> None:
    bench = bench_with(SCHEMA)
    with pytest.raises(MessageRefused, match="refuses message 1 of the batch, and 1 more") as caught:
        bench.publish("orders", [GOOD, BAD, GOOD, b"x"])
    assert caught.value.details["indexes"] == [1, 3]
    assert caught.value.details["middleware"] == "schema"
    assert [len(reason) > 0 for reason in caught.value.details["reasons"]] == [True, True]
    assert bench.publish("orders", [GOOD]).base_offset == 0
    assert bench.values("orders") == [GOOD]


def test_dead_letters_leave_gaps_at_their_offsets() -> None:
    bench = bench_with(DEAD)
    published = bench.publish("orders", [GOOD, BAD, OTHER], producer=Producer(99, 0, 0))
    assert (published.base_offset, published.duplicate, published.stored) == (0, False, None)
    assert bench.publish("orders", [BAD], producer=Producer(99, 0, 1)).base_offset == 3
    assert bench.publish("orders", [OTHER], producer=Producer(99, 0, 2)).base_offset == 4
    messages = [(one.offset, one.value) for batch in bench.batches("orders") for one in batch.messages()]
    assert messages == [(0, GOOD), (2, OTHER), (4, OTHER)]
    assert [value for value, _ in dead(bench)] == [BAD, BAD]
    (first, *_) = bench.batches("orders.dead")
    headers = first.columns().headers
    assert headers is not None
    assert headers[0] is not None
    assert headers[0]["headrace-dead-middleware"] == b"schema"
    assert headers[0]["headrace-dead-index"] == b"1"
    assert headers[0]["headrace-dead-topic"] == b"orders"
    assert b"required" in (headers[0]["headrace-dead-reason"] or b"")


def test_dead_letters_are_events() -> None:
    bench = bench_with(DEAD)
    bench.ask(EventsRecord())
    bench.publish("orders", [GOOD, BAD, BAD])
    bench.run()
    events = [json.loads(value or b"") for value in bench.values("headrace.events")]
    (event,) = [event for event in events if event["kind"] == "dead_letter"]
    assert (event["action"], event["name"]) == ("added", "orders")
    assert (event["details"]["middleware"], event["details"]["count"]) == ("schema", 2)


@pytest.mark.parametrize("values", [[GOOD, BAD], [BAD]])
def test_a_batch_with_dead_letters_is_recognised_when_it_is_sent_again(values: list[bytes]) -> None:
    disk = MemoryDisk()
    bench = Workbench("/data", disk=disk)
    bench.ask(TopicCreate("orders", {"middleware": [DEAD]}))
    first = Producer(99, 0, 0)
    bench.publish("orders", [GOOD], producer=first)
    bench.publish("orders", values, producer=Producer(99, 0, 1))
    for _ in range(3):
        again = bench.publish("orders", values, producer=Producer(99, 0, 1))
        assert (again.base_offset, again.duplicate) == (1, True)
        bench.close()
        bench = Workbench("/data", disk=disk)
    again = bench.publish("orders", values, producer=Producer(99, 0, 1))
    assert (again.base_offset, again.duplicate) == (1, True)
    assert bench.publish("orders", [OTHER], producer=Producer(99, 0, 2)).base_offset == 1 + len(values)
    with pytest.raises(OutOfOrderSequence):
        bench.publish("orders", [BAD], producer=Producer(99, 0, 9))
    assert bench.values("orders") == [GOOD, *(value for value in values if value != BAD), OTHER]
    assert [value for value, _ in dead(bench)] == [BAD]


def test_a_conditional_batch_is_refused_rather_than_divided() -> None:
    bench = bench_with(DEAD)
    with pytest.raises(MessageRefused) as caught:
        bench.publish("orders", [GOOD, BAD], expected_offset=0)
    assert caught.value.details["indexes"] == [1]
    assert bench.publish("orders", [GOOD], expected_offset=0).base_offset == 0
    with pytest.raises(UnexpectedOffset):
        bench.publish("orders", [GOOD], expected_offset=0)
    assert dead(bench) == []


def test_later_middleware_sees_only_what_earlier_ones_let_pass() -> None:
    bench = bench_with(DEAD, {"name": "suffix", "text": " "})
    bench.publish("orders", [BAD, GOOD])
    assert bench.values("orders") == [GOOD + b" "]
    assert [value for value, _ in dead(bench)] == [BAD]
    bench.ask(TopicAlter("orders", {"middleware": [{"name": "suffix", "text": " "}, DEAD]}))
    bench.publish("orders", [BAD, GOOD])
    assert [value for value, _ in dead(bench)] == [BAD, BAD + b" "]


def fails(_: Columns, __: MiddlewareContext) -> Any:
    raise ValueError("the secret is 42")


@pytest.mark.parametrize(
    ("on_publish", "text"),
    [
        (fails, "raised ValueError"),
        (lambda columns, _: columns.values, "returned list instead of columns"),
        (lambda columns, _: Columns([*columns.values, b"more"]), "returned 3 messages for 2"),
        (lambda columns, _: Columns(columns.values[:1]), "returned 1 messages for 2"),
        (lambda columns, _: Columns(["text"] * len(columns.values)), "cannot be stored"),
        (lambda _, __: RefusedMessages({7: "not there"}), "not in the batch"),
    ],
)
def test_a_middleware_that_misbehaves_refuses_the_batch(
    on_publish: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = bench_with({"name": "wrong"}, wrong=calls(on_publish))
    for _ in range(2):
        with pytest.raises(MiddlewareFailed, match=text) as caught:
            bench.publish("orders", [b"1", b"2"])
        assert not caught.value.retryable
        assert caught.value.details["middleware"] == "wrong"
        assert "secret" not in str(caught.value)
    assert len([one for one in caplog.records if "middleware failed" in one.getMessage()]) == 1
    assert "secret" not in caplog.text
    bench.tick(61)
    with pytest.raises(MiddlewareFailed):
        bench.publish("orders", [b"1", b"2"])
    assert len([one for one in caplog.records if "middleware failed" in one.getMessage()]) == 2
    assert bench.values("orders") == []


def test_one_that_may_change_the_number_tells_how_many_are_stored() -> None:
    double = calls(lambda columns, _: Columns([*columns.values, *columns.values]), changes_count=True)
    bench = bench_with({"name": "double"}, double=double)
    stamp = Producer(99, 0, 0)
    published = bench.publish("orders", [b"1", b"2"], producer=stamp)
    assert (published.base_offset, published.stored) == (0, 4)
    again = bench.publish("orders", [b"1", b"2"], producer=stamp)
    assert (again.base_offset, again.stored, again.duplicate) == (0, 4, True)
    published = bench.publish("orders", [b"3"], expected_offset=4)
    assert (published.base_offset, published.stored) == (4, 2)
    assert bench.values("orders") == [b"1", b"2", b"1", b"2", b"3", b"3"]
    assert bench.publish("plain", [b"1"]).stored is None


def test_one_that_leaves_no_message_fails() -> None:
    bench = bench_with({"name": "none"}, none=calls(lambda *_: Columns([]), changes_count=True))
    with pytest.raises(MiddlewareFailed, match="returned 0 messages"):
        bench.publish("orders", [b"1"])


def test_sizes_are_checked_after_middleware() -> None:
    settings = {"message_bytes_max": 10}
    bench = bench_with({"name": "suffix", "text": "x" * 9}, settings=settings)
    bench.publish("orders", [b"1"])
    with pytest.raises(MessageTooLarge):
        bench.publish("orders", [b"12"])
    short = bench_with({"name": "cut"}, settings=settings, cut=calls(lambda *_: Columns([b"short"])))
    short.publish("orders", [b"x" * 100])
    assert short.values("orders") == [b"short"]


def test_only_needed_columns_are_read_and_changed() -> None:
    def tag(columns: Columns, _: MiddlewareContext) -> Columns:
        count = len(columns.values)
        assert columns.keys is None
        with pytest.raises(LookupError, match="needs"):
            columns.values[0]
        return Columns([b"ignored"] * count, keys=[b"ignored"] * count, headers=[{"tag": b"1"}] * count)

    bench = bench_with({"name": "tag"}, tag=calls(tag, needs=("headers",)))
    values, keys = [b"%03d" % at * 40 for at in range(200)], [b"k%d" % at for at in range(200)]
    bench.ask(Publish("orders", 0), bench.batch(values, keys=keys, priorities=[1] * 200).data)
    (batch,) = bench.batches("orders")
    columns = batch.columns()
    assert (columns.values, columns.keys, columns.priorities) == (values, keys, [1] * 200)
    assert columns.headers == [{"tag": b"1"}] * 200


def test_the_context_says_who_published() -> None:
    seen: list[MiddlewareContext] = []

    def look(columns: Columns, context: MiddlewareContext) -> Columns:
        seen.append(context)
        return columns

    bench = Workbench(middleware={"look": calls(look)})
    session = bench.broker.connect(bench.pushed.append, "till-3", bench.now_us, tenant="acme", address="10.0.0.1:5",
                                   gateway="native")  # fmt: skip
    bench.ask(TopicCreate("orders", {"middleware": [{"name": "look"}]}), session=session)
    bench.ask(Publish("orders", 0), bench.batch([b"1"]).data, session)
    (context,) = seen
    assert (context.topic, context.tenant, context.partition) == ("orders", "acme", 0)
    assert (context.client, context.address, context.gateway) == ("till-3", "10.0.0.1:5", "native")
    assert context.time_us == bench.now_us


def test_dead_letters_of_another_tenant_stay_in_it() -> None:
    bench = Workbench()
    session = bench.connect("c", tenant="acme")
    bench.ask(TopicCreate("orders", {"middleware": [DEAD]}), session=session)
    assert bench.ask(Publish("orders", 0), bench.batch([GOOD, BAD]).data, session).base_offset == 0
    assert [value for value, _ in dead(bench, "acme/orders.dead")] == [BAD]
    with pytest.raises(MessageRefused, match="topic orders refuses"):
        bench.ask(Publish("orders", 0, expected_offset=2), bench.batch([BAD]).data, session)


# Threads.


def slow_bench(**settings: Any) -> Workbench:
    entry = {"name": "suffix", "text": "!", "inline": False}
    return bench_with(entry, settings={"middleware_seconds": 2.0, "partitions": 2, **settings})


def outcome_of(answer: Any) -> Any:
    return answer.outcome if isinstance(answer, PendingAnswer) else answer


def test_middleware_on_a_thread_keeps_the_order_of_its_partition() -> None:
    bench = slow_bench()
    bench.holding_workers = True
    answers = [bench.begin(Publish("orders", 0), bench.batch([b"%d" % at]).data) for at in range(10)]
    bench.run()
    assert not any(answer.resolved for answer in answers)
    assert not bench.broker.idle
    bench.release_workers()
    bench.run()
    assert [outcome_of(answer).base_offset for answer in answers] == list(range(10))
    assert bench.values("orders") == [b"%d!" % at for at in range(10)]
    assert bench.broker.idle


def test_middleware_that_hangs_refuses_its_topic_and_nothing_else() -> None:
    bench = slow_bench()
    bench.holding_workers = True
    first = bench.begin(Publish("orders", 0), bench.batch([b"1"]).data)
    second = bench.begin(Publish("orders", 0), bench.batch([b"2"]).data)
    bench.run()
    assert min(bench.wakes_us) == bench.now_us + 2_000_000
    bench.tick(2)
    for answer in (first, second):
        assert isinstance(outcome_of(answer), MiddlewareTimeout)
        assert outcome_of(answer).retryable
    assert isinstance(bench.begin(Publish("orders", 1), bench.batch([b"3"]).data), MiddlewareTimeout)
    assert bench.publish("others", [b"1"]).base_offset == 0
    bench.release_workers()
    bench.run()
    assert bench.publish("orders", [b"4"]).base_offset == 0
    assert bench.values("orders") == [b"4!"]


def test_the_number_of_threads_that_hang_is_bounded() -> None:
    bench = Workbench(middleware={"suffix": Suffix})
    entry = {"name": "suffix", "text": "!", "inline": False}
    bench.holding_workers = True
    for at in range(MIDDLEWARE_STUCK_MAX + 8):
        bench.ask(TopicCreate(f"t{at}", {"middleware": [entry], "middleware_seconds": 1}))
        bench.begin(Publish(f"t{at}", 0), bench.batch([b"1"]).data)
        bench.run()
        bench.tick(2)
    assert bench.threads <= MIDDLEWARE_STUCK_MAX + 4
    assert isinstance(bench.begin(Publish("t1", 0), bench.batch([b"1"]).data), MiddlewareTimeout)
    bench.release_workers()
    bench.run()
    assert bench.threads <= 4
    assert bench.publish("t1", [b"2"]).base_offset == 0
    assert bench.broker.idle


def test_an_altered_topic_leaves_a_thread_that_hangs_behind() -> None:
    bench = slow_bench()
    bench.holding_workers = True
    bench.begin(Publish("orders", 0), bench.batch([b"1"]).data)
    bench.run()
    bench.tick(3)
    bench.ask(TopicAlter("orders", {"middleware": [{"name": "suffix", "text": "?"}]}))
    assert bench.publish("orders", [b"2"]).base_offset == 0
    bench.release_workers()
    bench.run()
    assert bench.values("orders") == [b"2?"]


def test_what_waits_for_a_thread_is_bounded() -> None:
    bench = slow_bench()
    bench.holding_workers = True
    large = bench.batch([b"x" * 1_000_000] * 20).data
    answers: list[Any] = []
    while not any(isinstance(answer, Busy) for answer in answers):
        answers.append(bench.begin(Publish("orders", 0), large))
        assert len(answers) < 10
    bench.release_workers()
    bench.run()
    assert [outcome_of(answer).base_offset for answer in answers[:-1]] == [20 * at for at in range(len(answers) - 1)]


# Transactions.


def test_staged_batches_are_processed_when_they_are_staged() -> None:
    bench = bench_with(DEAD, {"name": "suffix", "text": " "})
    epoch = bench.ask(TransactionBegin("t")).epoch
    bench.ask(TransactionStage("t", epoch, "orders", 0), bench.batch([GOOD, BAD, OTHER]).data)
    only_bad = bench.ask(TransactionStage("t", epoch, "orders", 0), bench.batch([BAD]).data).stage
    assert dead(bench) == []
    assert only_bad
    committed = bench.ask(TransactionCommit("t", epoch))
    assert [(place.topic, place.offset) for place in committed.places] == [("orders", 0), ("orders", 3)]
    messages = [(one.offset, one.value) for batch in bench.batches("orders") for one in batch.messages()]
    assert messages == [(0, GOOD + b" "), (2, OTHER + b" ")]
    assert [value for value, _ in dead(bench)] == [BAD, BAD]


def test_dead_letters_of_a_batch_that_is_not_committed_are_dropped() -> None:
    bench = bench_with(DEAD)
    epoch = bench.ask(TransactionBegin("t")).epoch
    first = bench.ask(TransactionStage("t", epoch, "orders", 0), bench.batch([GOOD, BAD]).data).stage
    bench.ask(TransactionStage("t", epoch, "orders", 0), bench.batch([OTHER, b"other"]).data)
    bench.ask(TransactionCommit("t", epoch, [first]))
    assert bench.values("orders") == [GOOD]
    assert [value for value, _ in dead(bench)] == [BAD]


def test_a_refused_batch_leaves_its_transaction_open() -> None:
    bench = bench_with(SCHEMA)
    epoch = bench.ask(TransactionBegin("t")).epoch
    with pytest.raises(MessageRefused):
        bench.ask(TransactionStage("t", epoch, "orders", 0), bench.batch([BAD]).data)
    bench.ask(TransactionStage("t", epoch, "orders", 0), bench.batch([GOOD]).data)
    bench.ask(TransactionCommit("t", epoch))
    assert bench.values("orders") == [GOOD]


def test_a_transaction_is_not_committed_while_a_batch_is_processed() -> None:
    bench = slow_bench()
    epoch = bench.ask(TransactionBegin("t")).epoch
    bench.holding_workers = True
    staged = bench.begin(TransactionStage("t", epoch, "orders", 0), bench.batch([b"1"]).data)
    with pytest.raises(Busy):
        bench.ask(TransactionCommit("t", epoch))
    bench.release_workers()
    bench.run()
    assert not isinstance(outcome_of(staged), HeadraceError)
    bench.ask(TransactionCommit("t", epoch))
    assert bench.values("orders") == [b"1!"]


def test_a_transaction_is_not_committed_while_the_batch_of_a_cancelled_request_is_processed() -> None:
    bench = slow_bench()
    epoch = bench.ask(TransactionBegin("t")).epoch
    bench.holding_workers = True
    staged = bench.begin(TransactionStage("t", epoch, "orders", 0), bench.batch([b"1"]).data)
    assert staged.cancel()
    with pytest.raises(Busy):
        bench.ask(TransactionCommit("t", epoch))
    bench.release_workers()
    bench.run()
    bench.ask(TransactionCommit("t", epoch))
    assert bench.values("orders") == [b"1!"]


def test_a_shared_transaction_keeps_its_dead_letters_over_a_restart() -> None:
    disk = MemoryDisk()
    bench = Workbench("/data", disk=disk)
    bench.ask(TopicCreate("orders", {"middleware": [DEAD]}))
    epoch = bench.ask(TransactionBegin("t", join=True)).epoch
    stages = [
        bench.ask(TransactionStage("t", epoch, "orders", 0), bench.batch(values).data).stage
        for values in ([GOOD, BAD], [BAD], [b"dropped"])
    ]
    bench.close()
    bench = Workbench("/data", disk=disk)
    bench.ask(TransactionCommit("t", epoch, stages[:2]))
    messages = [(one.offset, one.value) for batch in bench.batches("orders") for one in batch.messages()]
    assert messages == [(0, GOOD)]
    assert [value for value, _ in dead(bench)] == [BAD, BAD]
    bench.close()


# Schedules.


def scheduled(bench: Workbench, value: bytes) -> Any:
    rule = ScheduleDefinition(name="tick", topic="orders", value=value, when="every 10s")
    return bench.ask(ScheduleSet(rule))


@pytest.mark.parametrize("inline", [True, False])
def test_messages_of_schedules_pass_through_middleware(inline: bool) -> None:
    bench = bench_with({"name": "suffix", "text": "!", "inline": inline})
    scheduled(bench, b"now")
    for _ in range(3):
        bench.tick(10)
    assert bench.values("orders") == [b"now!"] * 3


def test_runs_that_middleware_refuses_are_skipped() -> None:
    bench = bench_with(SCHEMA)
    scheduled(bench, BAD)
    for _ in range(3):
        bench.tick(10)
    assert bench.values("orders") == []
    (info,) = bench.ask(ScheduleList()).schedules
    assert (info.runs, info.skipped) == (0, 3)
    with pytest.raises(MessageRefused):
        bench.ask(ScheduleRun("tick"))
    bench.ask(TopicAlter("orders", {"middleware": [DEAD]}))
    bench.tick(10)
    assert bench.values("orders") == []
    assert [value for value, _ in dead(bench)] == [BAD]


def test_a_topic_without_middleware_stores_what_it_gets() -> None:
    bench, plain = bench_with(), Workbench()
    assert bench.broker._topics.get("orders").middleware is None
    sent = bench.batch([b"x" * 5000, b"y"], keys=[b"a", None])
    for one in (bench, plain):
        one.ask(Publish("orders", 0), bytes(sent.data))
    assert [bytes(batch.data)[40:] for batch in bench.batches("orders")] == [
        bytes(batch.data)[40:] for batch in plain.batches("orders")
    ]
