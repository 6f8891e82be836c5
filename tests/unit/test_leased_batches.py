"""Many messages at once: stored batches are handed out as they are where they can be, and nobody sees a difference."""

from pathlib import Path

import msgspec
import pytest

from headrace.broker.later import WithBody
from headrace.client.jobs import Job, holdings_of, leased_jobs
from headrace.engines.leased.contents import STORED_MIN
from headrace.model.batch import Columns, RawColumns, encode, encode_raw, parse
from headrace.model.codec import Codec
from headrace.model.errors import InvalidArgument
from headrace.model.leasing import (
    Ack,
    Change,
    Edit,
    Holding,
    Lease,
    MessageId,
    Release,
    SubscriptionCreate,
    SubscriptionDescribe,
)
from headrace.model.requests import Publish
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
    if not isinstance(answer, WithBody):
        return [], 0
    view, batches = memoryview(answer.body), 0
    while view:
        view, batches = view[parse(view).length :], batches + 1
    return leased_jobs("jobs", "default", answer.words, answer.body), batches


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
    edit = Edit("jobs", [MessageId(0, 5)], Change(replace=True))
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


STRANGE = [[1] * 40, [b"."] * 39, [["."]] * 40, {"a": 1}, 7, None]


@pytest.mark.parametrize("values", STRANGE)
def test_what_is_no_message_is_passed_over(tmp_path: Path, values: object, caplog: pytest.LogCaptureFixture) -> None:
    data = str(tmp_path)
    bench = Workbench(data)
    bench.ask(SubscriptionCreate("jobs"))
    bench.publish("jobs", [b"first"])
    bench.ask(Publish("jobs", 0), encode_raw(RawColumns(msgspec.Raw(msgspec.msgpack.encode(values))), 40, (1, 1)).data)
    bench.publish("jobs", [b"last"])
    for broker in (bench, Workbench(data, now_us=bench.now_us)):
        info = broker.ask(SubscriptionDescribe("jobs"))
        assert (info.ready, info.leased) == (2, 0)
    assert caplog.text.count("default passes over offsets 1 to 40") == 2
    jobs, _ = leased(broker, 100)
    assert [(job.offset, job.value) for job in jobs] == [(0, b"first"), (41, b"last")]


@pytest.mark.parametrize("holding", [Holding(0, 1, [], 3), Holding(0, 1, [5], -1), Holding(0, 1, [5], 1 << 40)])
def test_offsets_that_cannot_be_are_refused(holding: Holding) -> None:
    bench = filled()
    with pytest.raises(InvalidArgument):
        bench.ask(Ack("jobs", [holding]))
