"""The command `headrace sizes`: prints how many messages topics have."""

import argparse
from typing import Any

import headrace

api = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, and set the function to run."""
    parser.add_argument("pattern", nargs="?", default="*", help="which topics (default: all)")
    parser.add_argument("--connect", metavar="URL", help="the broker's address")
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line")
    parser.set_defaults(run=sizes)


def sizes(given: argparse.Namespace, out: Any, interrupts: Any) -> int:  # noqa: ARG001
    """Print the number of messages of each topic."""
    with headrace.connect(given.connect) as bus:
        for topic in bus.topics(given.pattern):
            count = sum(bus.offsets(topic.topic).values()) - sum(bus.offsets(topic.topic, "earliest").values())
            out.tell({"topic": topic.topic, "messages": count}, f"{count:10}  {topic.topic}")
    return 0
