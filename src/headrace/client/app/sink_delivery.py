"""The handler that delivers an app's messages to a sink."""

from headrace.client.app.handler_results import Reject
from headrace.client.leasing.jobs import Job
from headrace.model.errors import Closed
from headrace.sinks.sink import Sink, open_sink

SINK_SUBSCRIPTION = "sink"
"""The subscription of a sink, unless another is named."""


class SinkDelivery:
    """Delivers each message to the sink that a URL names; open while the app runs."""

    def __init__(self, url: str) -> None:
        """Check that the URL names a sink that can be opened."""
        self._url = url
        self._sink: Sink | None = None
        open_sink(url).close()

    def open(self) -> None:
        """Open the sink."""
        self._sink = open_sink(self._url)

    def close(self) -> None:
        """Close the sink."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()

    def __call__(self, job: Job) -> None:
        """Deliver a message; one that the sink refuses for good becomes a dead letter."""
        if self._sink is None:
            raise Closed("the sink is closed")
        try:
            self._sink.deliver([job])
        except Exception as error:
            if getattr(error, "retryable", True) is False:
                raise Reject(f"{type(error).__name__}: {error}") from error
            raise
