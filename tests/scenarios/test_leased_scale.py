"""Leased subscriptions with many messages, under a clock that is moved by hand."""

import random
import subprocess
import sys
from pathlib import Path

from headrace.broker.pending_answer import AnswerWithBody
from headrace.model.batch import Columns, encode, parse
from headrace.model.leasing import Ack, Holding, Lease, SubscriptionCreate, SubscriptionDescribe
from headrace.model.requests import Publish
from headrace.testing.workbench import Workbench

BYTES_MAX = 80
"""What a message that is not settled may take in the broker's memory."""


def test_five_million_messages_for_the_future_fit_into_memory(tmp_path: Path) -> None:
    script = Path(__file__).with_name("leased_memory.py")
    found = subprocess.run([sys.executable, str(script), str(tmp_path / "data")], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert 1 < float(found.stdout) < BYTES_MAX


def test_a_month_of_a_million_reminders_each_in_its_hour_and_in_order(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path))
    dice = random.Random(7)
    hour_us, month_us = 3_600_000_000, 30 * 24 * 3_600_000_000
    begin_us = bench.now_us
    bench.ask(SubscriptionCreate("reminders", settings={"discipline": "deadline"}))
    for _ in range(100):
        dues = [begin_us + dice.randrange(1, month_us) for _ in range(10_000)]
        batch = encode(Columns([b"%d" % due for due in dues], dues=dues), bench.now_us)
        bench.ask(Publish("reminders", 0), batch.data)
    seen, last = 0, 0
    while bench.now_us < begin_us + month_us:
        bench.tick(hour_us / 1e6)
        while (dues := leased_and_acked(bench)) != []:
            assert dues == sorted(dues)
            assert last <= dues[0]
            assert bench.now_us - hour_us < dues[0] <= dues[-1] <= bench.now_us
            last, seen = dues[-1], seen + len(dues)
    assert seen == 1_000_000
    info = bench.ask(SubscriptionDescribe("reminders"))
    assert (info.waiting, info.ready, info.leased, info.acked) == (0, 0, 0, 1_000_000)


def leased_and_acked(bench: Workbench) -> list[int]:
    """What is due by now: the messages' values, which say when."""
    answer = bench.ask(Lease("reminders", messages_max=10_000, bytes_max=1 << 24))
    if not isinstance(answer, AnswerWithBody):
        return []
    (portion,) = answer.answer.portions
    bench.ask(Ack("reminders", [Holding(0, portion.lease, portion.offsets, portion.following)]))
    return [int(value or b"") for value in parse(memoryview(answer.body)).columns().values]
