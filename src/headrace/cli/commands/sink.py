"""`headrace sink`: delivers messages of a topic to a sink until it is stopped."""

import argparse

from headrace.cli.arguments import completes, count, more_than_zero
from headrace.cli.connection import add_connection, connected
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output

_EPILOG = """\
examples:
  headrace sink orders file:///var/log/orders.ndjson
  headrace sink orders https://example.org/hooks/orders --deliveries-max 10
  headrace sink orders file:///tmp/copy.ndjson --subscription copy

Delivers the topic's messages until Ctrl-C or SIGTERM; then it finishes what it has
begun. A message is acknowledged when the sink has taken it, so after a crash the
last ones may arrive twice. What cannot be delivered is tried again with growing
delays, and in the end becomes a dead letter, which `headrace queue` shows.

file:///PATH appends a JSON object per line; http:// and https:// POST the same
object and take an answer of 2xx for success:

  {"topic": "orders", "partition": 0, "offset": 7, "timestamp": 1700000000000000,
   "key": "ann", "value": "3 apples", "headers": [["lang", "en"]]}

Bytes that are not UTF-8 are in key_base64 and value_base64. `headrace plugins
--group headrace.sinks` lists the schemes that there are.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace sink`."""
    from headrace.client.app.sink_delivery import SINK_SUBSCRIPTION

    parser.epilog = _EPILOG
    completes(parser.add_argument("topic", metavar="TOPIC", help="the topic's name"), "topic")
    parser.add_argument("url", metavar="URL", help="where messages are delivered to")
    parser.add_argument(
        "--subscription",
        metavar="NAME",
        default=SINK_SUBSCRIPTION,
        help=f"the leased subscription, created if it does not exist (default: {SINK_SUBSCRIPTION})",
    )
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=more_than_zero(int),
        default=1,
        help="how many messages are delivered at once (default: 1, which keeps their order)",
    )
    parser.add_argument(
        "--deliveries-max", metavar="N", type=count, help="make a message a dead letter after so many attempts"
    )
    add_connection(parser)
    parser.set_defaults(run=sink)


def sink(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Deliver messages until a signal arrives."""
    from headrace.client._sync.app.app import App

    retry = {} if given.deliveries_max is None else {"deliveries_max": given.deliveries_max}
    with connected(given, out) as bus:
        app = App(bus)
        app.deliver(
            given.topic, to=given.url, subscription=given.subscription, concurrency=given.concurrency, retry=retry
        )
        out.note(f"delivering {given.topic} to {given.url}; Ctrl-C ends this")
        app.run()  # until SIGINT or SIGTERM, which it takes for itself
    return 0
