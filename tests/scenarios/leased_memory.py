"""Publishes five million messages for the future, and prints how much memory each takes in the broker."""

import random
import resource
import sys

from headrace.model.batch import Columns, encode
from headrace.model.leasing import SubscriptionCreate, SubscriptionDescribe
from headrace.model.requests import Publish
from headrace.testing.workbench import Workbench

MESSAGES = 5_000_000
BATCH = 10_000


def resident_bytes() -> int:
    with open("/proc/self/statm") as memory:
        return int(memory.read().split()[1]) * resource.getpagesize()


def file_bytes() -> int:
    """Of that, what is only the page cache of mapped files."""
    with open("/proc/self/statm") as memory:
        return int(memory.read().split()[2]) * resource.getpagesize()


def main() -> None:
    bench = Workbench(sys.argv[1])
    dice = random.Random(1)
    bench.ask(SubscriptionCreate("reminders", settings={"discipline": "deadline"}))
    values = [b"x"] * BATCH
    before = resident_bytes() - file_bytes()
    for _ in range(MESSAGES // BATCH):
        dues = [bench.now_us + dice.randrange(1, 10**12) for _ in values]
        bench.ask(Publish("reminders", 0), encode(Columns(values, dues=dues), bench.now_us).data)
    assert bench.ask(SubscriptionDescribe("reminders")).waiting == MESSAGES
    print((resident_bytes() - file_bytes() - before) / MESSAGES)


if __name__ == "__main__":
    main()
