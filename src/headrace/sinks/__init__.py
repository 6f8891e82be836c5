"""Sinks: where messages of a topic are delivered to, outside the broker."""

from headrace.sinks.sink import Sink as Sink
from headrace.sinks.sink import open_sink as open_sink
