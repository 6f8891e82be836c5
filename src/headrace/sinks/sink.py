"""What a sink is, and how one is opened by its URL."""

from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlsplit

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.message import Message
from headrace.plugins import SINKS, find_plugin, make_plugin, plugin_names


class Sink(Protocol):
    """Takes messages to a place outside the broker. Several threads may call it at once."""

    def deliver(self, messages: Sequence[Message]) -> None:
        """Deliver messages; returns when they are there. Whatever it raises, they are delivered again later.

        A message is a `Received` or a `Job`, which have a topic and a partition too. An error with the attribute
        `retryable = False` says that trying again is of no use: the message becomes a dead letter at once.
        """

    def close(self) -> None:
        """Let go of what it has open; nothing is delivered afterwards."""


def open_sink(url: str) -> Sink:
    """Open the sink that a URL names: built in are `file`, `http` and `https`, plug-ins have other schemes.

    Raises InvalidArgument for a URL that no sink understands, PluginUnavailable if its plug-in cannot be used.
    """
    given: object = url
    try:
        scheme = urlsplit(given).scheme if isinstance(given, str) else ""
    except ValueError:
        scheme = ""
    if not scheme:
        raise InvalidArgument(f"a sink is a URL such as file:///var/log/orders.ndjson, not {shown(given)}")
    if find_plugin(SINKS, scheme) is None:
        known = ", ".join(plugin_names(SINKS))
        raise InvalidArgument(f"there is no sink for {shown(url)}; there are those for {known}; install a plug-in")
    sink: Sink = make_plugin(SINKS, scheme, ("deliver", "close"), url)
    return sink
