"""Logging levels of the broker: how much it logs about topics, producers and consumers."""

from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.model.errors import InvalidArgument
from headrace.model.log_level_requests import LogLevelList, LogLevelReset, LogLevelRule, LogLevelSet

LogLevelRules = list[LogLevelRule]


class LogLevelAdmin:
    """Sets how much the broker logs about topics, producers and consumers, while it runs; `bus.logging`.

    Example:
        >>> bus.logging.set("debug", topic="orders.*")
        >>> [(rule.scope, rule.pattern, rule.level) for rule in bus.logging.list()]
        [('topic', 'orders.*', 'debug')]
        >>> bus.logging.reset()
    """

    def __init__(self, bus: object, broker: ReconnectingConnection) -> None:
        self._bus = bus  # it closes its connections when nobody holds it
        self._broker = broker

    def set(
        self, level: str, *, topic: str | None = None, producer: str | None = None, consumer: str | None = None
    ) -> None:
        """Set the level of topics, producers or consumers; or, with none of these, the broker's own.

        The broker remembers the levels, but for its own, which lasts until it is stopped. Of several patterns that
        match a name, the one with more characters of its own counts, and a name before all patterns.

        Parameters:
            level: `debug` logs each batch that is published, delivered, leased or settled, without its content; `info`
                is the default; `warning` and `error` leave out what is less.
            topic: a topic's name, or a pattern: `*` stands for any characters, `?` for one.
            producer: the name of a client that publishes, or a pattern.
            consumer: the name of a client that reads or leases, of a group or of a leased subscription, or a pattern.

        Raises:
            InvalidArgument: if the level or a pattern is wrong, or more than one of topic, producer and consumer given.
            LimitExceeded: if too many levels are set.
            Timeout: if the broker does not answer in time.

        Example:
            >>> bus.logging.set("warning", consumer="slow-*")
            >>> bus.logging.reset(consumer="slow-*")
        """
        scope, pattern = _scope(topic, producer, consumer)
        self._broker.request(LogLevelSet(LogLevelRule(scope or "broker", pattern, level)))

    def list(self) -> LogLevelRules:
        """List the levels that are set in this tenant.

        Returns:
            The levels.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> bus.logging.list()
            []
        """
        answer = self._broker.request(LogLevelList())
        return answer.rules

    def reset(
        self,
        *,
        topic: str | None = None,
        producer: str | None = None,
        consumer: str | None = None,
        broker: bool = False,
    ) -> None:
        """Forget the level of a name or pattern, as it was set; with no argument all levels of this tenant.

        Parameters:
            topic: the topic, or pattern.
            producer: the producer, or pattern.
            consumer: the consumer, or pattern.
            broker: reset the broker's own level.

        Raises:
            InvalidArgument: if more than one argument is given.
            Timeout: if the broker does not answer in time.

        Example:
            >>> bus.logging.set("debug", topic="orders")
            >>> bus.logging.reset(topic="orders")
            >>> bus.logging.list()
            []
        """
        scope, pattern = _scope(topic, producer, consumer)
        if scope and broker:
            raise InvalidArgument("give one of topic, producer, consumer and broker")
        self._broker.request(LogLevelReset("broker" if broker else scope, pattern))


def _scope(topic: str | None, producer: str | None, consumer: str | None) -> tuple[str, str]:
    """The scope and pattern of which one is given; empty if none is."""
    given = {"topic": topic, "producer": producer, "consumer": consumer}
    found = [(scope, pattern) for scope, pattern in given.items() if pattern is not None]
    if len(found) > 1:
        raise InvalidArgument("give one of topic, producer and consumer: each has levels of its own")
    return found[0] if found else ("", "")
