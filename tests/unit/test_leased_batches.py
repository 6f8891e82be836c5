"""Many messages at once: stored batches are handed out as they are where they can be, and nobody sees a difference."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace.broker.dead_letters import PREFIX
from headrace.broker.pending_answer import AnswerWithBody
from headrace.client.leasing.jobs import Job, found_messages, holdings_of, leased_jobs
from headrace.engines.leased.contents import STORED_MIN
from headrace.model.batch import Batch, Columns, RawColumns, encode, encode_raw, parse
from headrace.model.codec import Codec
from headrace.model.errors import InvalidArgument, InvalidBatch, MessageTooLarge
from headrace.model.leasing import (
    OWNER_HEADER,
    Ack,
    Edit,
    Find,
    Holding,
    Lease,
    MessageChange,
    MessageId,
    Redrive,
    Reject,
    Release,
    Selection,
    SubscriptionCreate,
    SubscriptionDescribe,
)
from headrace.model.limits import MESSAGE_BYTES_MAX
from headrace.model.requests import Publish, TopicCreate
from headrace.testing.workbench import Workbench

SIZES = (STORED_MIN, 3, STORED_MIN + 10, 2 * STORED_MIN)
TOTAL = sum(SIZES)


def filled(*, codec: Codec = Codec.NONE, **settings: object) -> Workbench:
    bench = Workbench()
    number = 0
    for size in SIZES:
        values = [b"%04d" % (number + at) for at in range(size)]
        keys = [b"key %d" % (at % 3) for at in range(size)]
        bench.ask(Publish("jobs", 0), encode(Columns(values, keys=keys), bench.now_us, codec=codec).data)
        number += size
    bench.ask(SubscriptionCreate("jobs", settings=dict(settings)))
    return bench


def leased(bench: Workbench, most: int, bytes_max: int = 1 << 20) -> tuple[list[Job], int]:
    """The messages, and in how many batches they came."""
    answer = bench.ask(Lease("jobs", messages_max=most, bytes_max=bytes_max))
    if not isinstance(answer, AnswerWithBody):
        return [], 0
    view, batches = memoryview(answer.body), 0
    while view:
        view, batches = view[parse(view).length :], batches + 1
    return leased_jobs("jobs", "default", answer.answer, answer.body), batches


def numbers(jobs: list[Job]) -> list[int]:
    assert [int(job.value or b"") for job in jobs] == [job.offset for job in jobs]
    return [job.offset for job in jobs]


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("most", [1, STORED_MIN - 1, STORED_MIN, STORED_MIN + 1, 2 * STORED_MIN, TOTAL, 1000])
def test_every_message_comes_once_and_in_order(codec: Codec, most: int) -> None:
    bench = filled(codec=codec)
    seen: list[int] = []
    while jobs := leased(bench, most)[0]:
        seen += numbers(jobs)
        assert len(jobs) == min(most, TOTAL - len(seen) + len(jobs))
        assert bench.ask(Ack("jobs", holdings_of(jobs))).refused == []
    assert seen == list(range(TOTAL))
    assert bench.ask(SubscriptionDescribe("jobs")).acked == TOTAL


def test_batches_that_are_wanted_whole_come_as_they_are() -> None:
    jobs, batches = leased(filled(), STORED_MIN + 3 + STORED_MIN)
    assert numbers(jobs) == list(range(2 * STORED_MIN + 3))
    assert batches == 2  # the first one, and one of what is small or not wanted whole
    assert {job.key for job in jobs} == {b"key 0", b"key 1", b"key 2"}


def test_no_more_bytes_than_were_asked_for() -> None:
    jobs, batches = leased(filled(), TOTAL, bytes_max=9 * STORED_MIN)  # of four for the value, and five for the key
    assert batches == 1
    assert numbers(jobs) == list(range(STORED_MIN))


def test_an_edited_message_comes_as_it_is_now() -> None:
    bench = filled()
    new = encode(Columns([b"9999"]), bench.now_us)
    edit = Edit("jobs", [MessageId(0, 5)], MessageChange(replace=True))
    assert bench.ask(edit, new.data).outcomes[0].outcome == "applied"
    jobs, _ = leased(bench, TOTAL)
    assert [job.value for job in jobs][5] == b"9999"
    assert [job.version for job in jobs][4:7] == [1, 2, 1]


def test_what_was_given_back_comes_with_its_count() -> None:
    bench = filled()
    jobs, _ = leased(bench, STORED_MIN)
    bench.ask(Release("jobs", holdings_of(jobs[3:5]), 0))
    bench.ask(Ack("jobs", holdings_of(jobs[:3] + jobs[5:])))
    again, _ = leased(bench, STORED_MIN)
    assert numbers(again)[:2] == [3, 4]
    assert [job.deliveries for job in again][:3] == [2, 2, 1]


def test_a_part_of_a_lease_can_be_settled_and_then_the_rest() -> None:
    bench = filled()
    jobs, _ = leased(bench, TOTAL)
    assert bench.ask(Ack("jobs", holdings_of(jobs[10:20]))).refused == []
    assert bench.ask(SubscriptionDescribe("jobs")).leased == TOTAL - 10
    refused = bench.ask(Ack("jobs", holdings_of(jobs))).refused
    assert [(each.offset, each.code) for each in refused] == [(at, "message_gone") for at in range(10, 20)]
    assert bench.ask(SubscriptionDescribe("jobs")).leased == 0


def test_one_of_a_key_at_a_time() -> None:
    assert len(leased(filled(ordered_by_key=True), TOTAL)[0]) == 3


def peak_bytes(call: Callable[[], object]) -> int:
    """How much memory is taken at most while something is done."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def large(tmp_path: Path, codec: Codec, **settings: object) -> Workbench:
    """A broker with sixty messages of a megabyte, each in a batch of its own and with a priority of its own."""
    bench = Workbench(str(tmp_path))
    for number in range(60):
        columns = Columns([(b"%04d" % number).ljust((1 << 20) - 100, b".")], priorities=[number * 7 % 60])
        bench.ask(Publish("jobs", 0), encode(columns, bench.now_us, codec=codec).data)
    bench.ask(SubscriptionCreate("jobs", settings=dict(settings)))
    return bench


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("discipline", ["fifo", "lifo", "priority", "deadline"])
def test_no_more_is_read_than_was_asked_for(tmp_path: Path, codec: Codec, discipline: str) -> None:
    bench = large(tmp_path, codec, discipline=discipline)
    order = {
        "lifo": list(reversed(range(60))),
        "priority": sorted(range(60), key=lambda number: -(number * 7 % 60)),
    }.get(discipline, list(range(60)))
    seen: list[int] = []
    for bytes_max in (1, 1, 3 << 20):

        def take(bytes_max: int = bytes_max) -> None:
            seen.extend(job.offset for job in leased(bench, 60, bytes_max)[0])

        # The message and its copies, on the way out and at the one who asked.
        assert peak_bytes(take) < (16 << 20) + 6 * bytes_max
    assert seen == order[:5]
    while jobs := leased(bench, 60, 3 << 20)[0]:  # and those that were not read are all there
        seen += [job.offset for job in jobs]
    assert seen == order


def test_one_of_a_key_at_a_time_reads_no_more_than_was_asked_for(tmp_path: Path) -> None:
    bench = large(tmp_path, Codec.LZ4, ordered_by_key=True)
    assert peak_bytes(lambda: leased(bench, 60, 1)) < 16 << 20
    seen = 1
    while jobs := leased(bench, 60, 1 << 20)[0]:
        seen += len(jobs)
    assert seen == 60


def test_what_is_kept_of_batches_is_bounded_in_bytes() -> None:
    bench = Workbench()
    for _ in range(12):
        columns = Columns([bytes(1 << 20)] * 15)
        bench.ask(Publish("jobs", 0), encode(columns, bench.now_us, codec=Codec.LZ4).data)
    bench.ask(SubscriptionCreate("jobs"))

    def take() -> None:
        for _ in range(12 * 15):
            leased(bench, 1, 1)

    assert peak_bytes(take) < 96 << 20


def test_nothing_is_kept_of_batches_that_are_done_with() -> None:
    bench = Workbench()
    bench.ask(SubscriptionCreate("jobs"))
    bench.ask(Publish("jobs", 0), encode(Columns([bytes(1 << 20)] * 20), bench.now_us, codec=Codec.LZ4).data)
    tracemalloc.start()
    try:
        while jobs := leased(bench, 7, 7 << 20)[0]:
            bench.ask(Ack("jobs", holdings_of(jobs)))
        del jobs
        assert tracemalloc.get_traced_memory()[0] < 2 << 20
    finally:
        tracemalloc.stop()


def test_a_search_reads_no_more_than_fits_on_its_page(tmp_path: Path) -> None:
    bench = large(tmp_path, Codec.NONE)
    seen: list[int] = []
    after = ""

    def find() -> str:
        answer = bench.ask(Find("jobs", Selection("ready"), messages_max=60, after=after))
        assert isinstance(answer, AnswerWithBody)
        seen.extend(message.offset for message in answer.answer.messages)
        return answer.answer.after

    assert peak_bytes(find) < 48 << 20
    seen.clear()
    while len(seen) < 60:
        after = find()
    assert seen == list(range(60))


def test_the_dead_are_sent_away_and_brought_back_some_at_a_time(tmp_path: Path) -> None:
    bench = large(tmp_path, Codec.NONE, deliveries_max=1)
    jobs, _ = leased(bench, 31, 31 << 20)
    assert len(jobs) == 31

    def bury() -> None:
        assert bench.ask(Reject("jobs", holdings_of(jobs), "no")).refused == []

    assert peak_bytes(bury) < 80 << 20
    assert bench.ask(SubscriptionDescribe("jobs")).dead == 31
    back = 0
    while True:
        told = bench.ask(Redrive("jobs", messages_max=100))
        back += told.messages
        if not told.more:
            break
    assert back == 31
    assert bench.ask(SubscriptionDescribe("jobs")).ready == 60


def test_whoever_publishes_to_the_dead_harms_no_redrive() -> None:
    bench = filled()
    jobs, _ = leased(bench, 1)
    bench.ask(Reject("jobs", holdings_of(jobs), "no"))
    about = {"topic": b"jobs", "subscription": b"default"}
    for partition in (b"", b"-1", b"nothing", b"9" * 5000, b"7"):
        headers = {f"{PREFIX}{name}": text for name, text in {**about, "partition": partition}.items()}
        headers |= {f"{PREFIX}time": b"9" * 5000, f"{PREFIX}deliveries": b"9" * 19}
        bench.ask(Publish("jobs.dead", 0), bench.batch([b"back"], headers=[headers]).data)
    answer = bench.ask(Find("jobs", Selection("dead")))
    assert len(found_messages("jobs", answer.answer, answer.body)) == 6
    assert bench.ask(Redrive("jobs")).messages == 6
    assert bench.ask(SubscriptionDescribe("jobs")).ready == TOTAL + 5


@pytest.mark.parametrize("edit", [False, True])
def test_a_message_as_large_as_it_may_be_can_be_edited_and_die(edit: bool) -> None:
    bench = Workbench()
    bench.ask(TopicCreate("jobs", {"message_bytes_max": MESSAGE_BYTES_MAX}))
    bench.ask(SubscriptionCreate("jobs"))
    whole = bytes(MESSAGE_BYTES_MAX - 100)
    columns = Columns([b"small" if edit else whole], headers=[{OWNER_HEADER: b"me" * 20}])
    bench.ask(Publish("jobs", 0), encode(columns, bench.now_us).data)
    if edit:
        change = Edit("jobs", [MessageId(0, 0)], MessageChange(replace=True), "me" * 20)
        refused = bench.ask(change, encode(Columns([bytes(MESSAGE_BYTES_MAX)]), bench.now_us).data)
        assert refused.outcomes[0].outcome == MessageTooLarge.code  # with the owner, whom it keeps
        assert bench.ask(change, encode(Columns([whole]), bench.now_us).data).outcomes[0].outcome == "applied"
    jobs, _ = leased(bench, 1)
    assert jobs[0].value == whole
    bench.ask(Reject("jobs", holdings_of(jobs), "x" * 8000))
    assert bench.ask(SubscriptionDescribe("jobs")).dead == 1
    assert bench.ask(Redrive("jobs")).messages == 1
    assert len(leased(bench, 1)[0]) == 1


STRANGE = [[1] * 40, [b"."] * 39, [["."]] * 40, {"a": 1}, 7, None]


FAR = [1 << 63] * 40
FAR_AWAY = [{"dues": FAR}, {"timestamps": FAR}, {"expires": FAR}, {"priorities": FAR}, {"dues": [-(1 << 63)] * 40}]


def strange(values: object, columns: dict[str, object]) -> Batch:
    """A batch of forty messages that an earlier version might have stored."""
    packed = {name: msgspec.Raw(msgspec.msgpack.encode(column)) for name, column in columns.items()}
    return encode_raw(RawColumns(msgspec.Raw(msgspec.msgpack.encode(values)), **packed), 40, (1, 1))


def store(bench: Workbench, batch: Batch) -> None:
    """Put a batch into the log, as it is."""
    topics = bench.broker._topics
    topics.active(topics.get("jobs"), 0).partition.append(batch, bench.now_us)


@pytest.mark.parametrize("discipline", ["fifo", "priority", "deadline"])
@pytest.mark.parametrize(
    ("values", "columns"), [*((each, {}) for each in STRANGE), *(([b"."] * 40, each) for each in FAR_AWAY)]
)
def test_what_is_no_message_is_passed_over(
    tmp_path: Path, values: object, columns: dict, discipline: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = str(tmp_path)
    bench = Workbench(data)
    bench.ask(SubscriptionCreate("jobs", settings={"discipline": discipline}))
    bench.publish("jobs", [b"first"])
    batch = strange(values, columns)
    with pytest.raises(InvalidBatch):
        bench.ask(Publish("jobs", 0), batch.data)
    store(bench, batch)
    bench.publish("jobs", [b"last"])
    for broker in (bench, Workbench(data, now_us=bench.now_us)):
        info = broker.ask(SubscriptionDescribe("jobs"))
        assert (info.ready, info.leased) == (2, 0)
    assert caplog.text.count("subscription=default offsets=1 to 40") == 2
    jobs, _ = leased(broker, 100)
    assert [(job.offset, job.value) for job in jobs] == [(0, b"first"), (41, b"last")]


@pytest.mark.parametrize("holding", [Holding(0, 1, [], 3), Holding(0, 1, [5], -1), Holding(0, 1, [5], 1 << 40)])
def test_offsets_that_cannot_be_are_refused(holding: Holding) -> None:
    bench = filled()
    with pytest.raises(InvalidArgument):
        bench.ask(Ack("jobs", [holding]))
