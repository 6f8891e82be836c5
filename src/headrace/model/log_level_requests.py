"""Logging levels per topic, producer and consumer: the requests and answers about them."""

from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, WireStruct, declare

LOG_SCOPES = ("broker", "topic", "producer", "consumer")
"""What a logging level can apply to."""
LOG_LEVELS = ("debug", "info", "warning", "error")
"""At `debug` each batch that is published, delivered, leased or settled is logged; `info` is as where none is set."""


class LogLevelRule(WireStruct):
    """A logging level, and what it applies to."""

    scope: str
    """`topic`; `producer` and `consumer`: clients by their names, and for consumers also groups and leased
    subscriptions; or `broker`: all that the broker logs, until it is stopped."""
    pattern: str
    """A name, or a pattern: `*` stands for any characters, `?` for one. Empty for the broker."""
    level: str
    """`debug`, `info`, `warning` or `error`."""


class LogLevelsFound(Answer):
    """The levels that are set; the answer to all requests about them."""

    rules: list[LogLevelRule]


@declare(Kind.LOG_LEVEL_SET, Permission(Verb.ADMINISTER, Resource.BROKER))
class LogLevelSet(Request[LogLevelsFound]):
    """Set a logging level, in place of the one of the same scope and pattern."""

    rule: LogLevelRule


@declare(Kind.LOG_LEVEL_RESET, Permission(Verb.ADMINISTER, Resource.BROKER))
class LogLevelReset(Request[LogLevelsFound]):
    """Forget the logging level of a scope and pattern; without a scope all of the tenant."""

    scope: str = ""
    pattern: str = ""


@declare(Kind.LOG_LEVEL_LIST, Permission(Verb.DESCRIBE, Resource.BROKER))
class LogLevelList(Request[LogLevelsFound]):
    """Which logging levels are set in the session's tenant?"""
