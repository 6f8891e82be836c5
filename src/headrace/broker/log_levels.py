"""Logging levels per topic, producer and consumer, changed while the broker runs.

Where no level is set, nothing here is on the path of a message: the broker's own handlers and readers answer requests.
While levels are set, requests go through handlers that log them first, and readers and leases call back.
"""

import fnmatch
import logging
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from headrace.broker.facts import LogLevelStored
from headrace.broker.leased_facts import MessagesLeased
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.signal import Signal, TakenShare
from headrace.broker.subscription import Subscription
from headrace.engines.api import unpacked
from headrace.model.arguments import shown
from headrace.model.batch import received
from headrace.model.errors import InvalidArgument, LimitExceeded
from headrace.model.leasing import Ack, Extend, Holding, Reject, Release
from headrace.model.limits import GROUP_NAME_CHARS_MAX, LOG_RULES_MAX
from headrace.model.log_level_requests import (
    LOG_LEVELS,
    LOG_SCOPES,
    LogLevelReset,
    LogLevelRule,
    LogLevelSet,
    LogLevelsFound,
)
from headrace.model.reading import Fetch
from headrace.model.request import Request
from headrace.model.requests import Commit, GroupJoin, Publish, TransactionStage
from headrace.model.topic import DEFAULT_TENANT, tenant_of

logger = logging.getLogger("headrace.broker")
traffic = logging.getLogger("headrace.traffic")
"""What is logged of single batches, at the level debug."""

Handler = Callable[[Session, Any, memoryview, int], Any]

_NUMBERS = {level: getattr(logging, level.upper()) for level in LOG_LEVELS}
_OWN = "broker"
"""The scope of the broker's own level."""
_KNOWN_MAX = 10_000
"""Names whose levels are remembered."""
_WILDCARDS = re.compile(r"[*?]")
_PLACEHOLDER = re.compile(r"(?:(\w+)=)?%(?:[-+ #0]*\d*(?:\.\d+)?[srdfx])")
_SCOPES_OF_FACTS = {
    "topic": ("topic",),
    "subscription": ("consumer",),
    "group": ("consumer",),
    "client": ("producer", "consumer"),
}
"""The scopes whose levels apply to a log line with such a fact."""


class LogLevels:
    """The levels of a broker, and what follows from them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.taking: Signal[TakenShare] = Signal()
        """Emitted before a tenant takes more of what the broker has for all; a listener refuses by raising."""
        self.changed: Signal[str, str, list[LogLevelRule], int] = Signal()
        """Levels were `set` or `reset`: the tenant, the action, which ones, and the time."""
        self._rules: dict[tuple[str, str], list[tuple[str, Callable[[str], object], int]]] = {}
        """By tenant and scope: patterns, how they match, and the number of the level; the most specific first."""
        self._known: dict[tuple[str, str, str], int] = {}
        """Levels that were found, by tenant, scope and name."""
        self._own_level: str | None = None
        """The broker's own level, if it was set."""
        self._level_before = logging.NOTSET
        self._filter = _QuietFilter(self)
        self._rebuild()

    @property
    def active(self) -> bool:
        """Whether the level of any topic, producer or consumer is set."""
        return bool(self._rules)

    # Requests.

    def set(self, session: Session, request: LogLevelSet, now_us: int) -> PendingAnswer[LogLevelsFound]:
        """Set a level."""
        rule, tenant = request.rule, session.tenant
        _check(rule, tenant)
        if rule.scope == _OWN:
            self._set_own(rule.level)
        else:
            key = tenant, rule.scope, rule.pattern
            levels = self._ledger.state.log_levels
            if key not in levels and len(levels) >= LOG_RULES_MAX:
                raise LimitExceeded(f"there are {LOG_RULES_MAX} logging levels, which is the maximum; reset some")
            if key not in levels:
                used = sum(1 for one in levels if one[0] == tenant)
                self.taking(TakenShare(tenant, "logging_levels", used, len(levels), LOG_RULES_MAX))
            self._ledger.record(now_us, LogLevelStored(*key, rule.level))
            self._rebuild()
        self.changed(tenant, "set", [rule], now_us)
        return self._ledger.durably(self.listed(session))

    def reset(self, session: Session, request: LogLevelReset, now_us: int) -> PendingAnswer[LogLevelsFound]:
        """Forget a level, or all of the tenant."""
        if request.scope and request.scope not in LOG_SCOPES:
            raise InvalidArgument(f"scope is {', '.join(LOG_SCOPES)}, not {shown(request.scope)}")
        gone = [
            rule
            for rule in self.listed(session).rules
            if not request.scope or (rule.scope == request.scope and request.pattern == rule.pattern)
        ]
        stored = [LogLevelStored(session.tenant, rule.scope, rule.pattern, "") for rule in gone if rule.scope != _OWN]
        if stored:
            self._ledger.record(now_us, *stored)
            self._rebuild()
        if request.scope in ("", _OWN) and session.tenant == DEFAULT_TENANT:
            self._reset_own()
        if gone:
            self.changed(session.tenant, "reset", gone, now_us)
        return self._ledger.durably(self.listed(session))

    def reload(self) -> None:
        """Apply the levels that the journal has, after those of a tenant were forgotten."""
        self._rebuild()

    def listed(self, session: Session) -> LogLevelsFound:
        """The levels that are set in the session's tenant."""
        rules = [
            LogLevelRule(fact.scope, fact.pattern, fact.level)
            for fact in sorted(self._ledger.state.log_levels.values(), key=lambda fact: (fact.scope, fact.pattern))
            if fact.tenant == session.tenant
        ]
        if self._own_level is not None and session.tenant == DEFAULT_TENANT:
            rules.insert(0, LogLevelRule(_OWN, "", self._own_level))
        return LogLevelsFound(rules)

    def close(self) -> None:
        """Leave the process's logging as it was found."""
        logger.removeFilter(self._filter)
        self._reset_own()

    # What applies.

    def level(self, tenant: str, scope: str, name: str) -> int:
        """The level of a name, as a number of `logging`: that of the most specific pattern, by default info."""
        key = tenant, scope, name
        found = self._known.get(key)
        if found is None:
            rules = self._rules.get((tenant, scope), ())
            found = next((number for _, matches, number in rules if matches(name)), logging.INFO)
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[key] = found
        return found

    def traces(self, topic: str, scope: str, *names: str) -> bool:
        """Whether batches of a topic are logged, or those of a producer or consumer that has one of these names."""
        tenant, bare = tenant_of(topic), topic.rpartition("/")[2]
        levels = (self.level(tenant, scope, name.rpartition("/")[2]) for name in names if name)
        return self.level(tenant, "topic", bare) <= logging.DEBUG or any(level <= logging.DEBUG for level in levels)

    def _rebuild(self) -> None:
        """Compile the rules, the most specific ones first: names, then patterns with more characters of their own."""
        self._rules, self._known = {}, {}
        stored = self._ledger.state.log_levels.values()
        for fact in sorted(stored, key=lambda fact: _specificity(fact.pattern), reverse=True):
            rule = fact.pattern, _matcher(fact.pattern), _NUMBERS.get(fact.level, logging.INFO)
            self._rules.setdefault((fact.tenant, fact.scope), []).append(rule)
        logger.removeFilter(self._filter)
        if self._rules:
            traffic.setLevel(logging.DEBUG)
            logger.addFilter(self._filter)

    def _set_own(self, level: str) -> None:
        own = logging.getLogger("headrace")
        if self._own_level is None:
            self._level_before = own.level
        self._own_level = level
        own.setLevel(_NUMBERS[level])
        logger.log(max(_NUMBERS[level], logging.INFO), "log level set  level=%s", level)

    def _reset_own(self) -> None:
        if self._own_level is not None:
            self._own_level = None
            logging.getLogger("headrace").setLevel(self._level_before)

    # Logging of traffic.

    def traced(self, handlers: dict[type[Request[Any]], Handler]) -> dict[type[Request[Any]], Handler]:
        """The handlers, of which those of traffic log first."""
        tracers: dict[type[Request[Any]], Callable[[Session, Any, memoryview], None]] = {
            Publish: self._trace_publish,
            TransactionStage: self._trace_publish,
            Fetch: self._trace_fetch,
            GroupJoin: self._trace_join,
            Commit: self._trace_commit,
            Ack: self._trace_settlement,
            Extend: self._trace_settlement,
            Release: self._trace_settlement,
            Reject: self._trace_settlement,
        }

        def with_tracing(handler: Handler, trace: Callable[[Session, Any, memoryview], None]) -> Handler:
            def handle(session: Session, request: Any, body: memoryview, now_us: int) -> Any:
                outcome = handler(session, request, body, now_us)
                trace(session, request, body)
                return outcome

            return handle

        return {
            kind: with_tracing(handler, tracers[kind]) if kind in tracers else handler
            for kind, handler in handlers.items()
        }

    def _trace_publish(self, session: Session, request: Publish | TransactionStage, body: memoryview) -> None:
        if self.traces(request.topic, "producer", session.client):
            batch = received(body)
            event = "publish" if isinstance(request, Publish) else "publish in transaction"
            traffic.debug(
                "%s  topic=%s partition=%s client=%s messages=%s bytes=%s",
                event, request.topic, request.partition, session.client, batch.count, batch.length,
            )  # fmt: skip

    def _trace_fetch(self, session: Session, request: Fetch, _: memoryview) -> None:
        if self.traces(request.topic, "consumer", session.client):
            traffic.debug(
                "fetch  topic=%s partition=%s client=%s offset=%s",
                request.topic, request.partition, session.client, request.offset,
            )  # fmt: skip

    def _trace_join(self, session: Session, request: GroupJoin, _: memoryview) -> None:
        if any(self.traces(topic, "consumer", session.client, request.group) for topic in request.topics):
            traffic.debug(
                "join  group=%s member=%s client=%s topics=%s",
                request.group, request.member, session.client, ",".join(request.topics),
            )  # fmt: skip

    def _trace_commit(self, session: Session, request: Commit, _: memoryview) -> None:
        for place in request.places:
            if self.traces(place.topic, "consumer", session.client, request.group):
                traffic.debug(
                    "commit  topic=%s partition=%s group=%s client=%s offset=%s",
                    place.topic, place.partition, request.group, session.client, place.offset,
                )  # fmt: skip

    def _trace_settlement(self, session: Session, request: Ack | Extend | Release | Reject, _: memoryview) -> None:
        if self.traces(request.topic, "consumer", session.client, request.subscription):
            holdings: list[Holding] = request.holdings
            traffic.debug(
                "%s  topic=%s subscription=%s client=%s messages=%s",
                type(request).__name__.lower(), request.topic, request.subscription, session.client,
                sum(len(holding.all_offsets) for holding in holdings),
            )  # fmt: skip

    def trace_lease(self, subscription: Subscription, client: str, leased: list[MessagesLeased]) -> None:
        """Log messages that were leased."""
        topic = str(subscription.topic)
        if self.traces(topic, "consumer", client, subscription.name):
            for fact in leased:
                traffic.debug(
                    "lease  topic=%s partition=%s subscription=%s client=%s lease=%s messages=%s",
                    topic, fact.partition, subscription.name, client, fact.number, len(unpacked(fact.offsets)),
                )  # fmt: skip

    def trace_delivery(self, topic: str, partition: int, client: str, first: int, end: int, size_bytes: int) -> None:
        """Log batches that a stream delivers."""
        if self.traces(topic, "consumer", client):
            traffic.debug(
                "deliver  topic=%s partition=%s client=%s first=%s next=%s bytes=%s",
                topic, partition, client, first, end, size_bytes,
            )  # fmt: skip

    def silences(self, record: logging.LogRecord) -> bool:
        """Whether a log line is about something whose level is higher than the line's."""
        for name, content in _facts(record):
            if isinstance(content, Subscription):
                topic = content.topic.name
                about = [(topic.tenant, "topic", topic.topic), (topic.tenant, "consumer", content.name)]
            else:
                tenant, bare = tenant_of(str(content)), str(content).rpartition("/")[2]
                about = [(tenant, scope, bare) for scope in _SCOPES_OF_FACTS[name]]
            if any(self.level(*one) > record.levelno for one in about):
                return True
        return False


class _QuietFilter(logging.Filter):
    """Leaves out log lines about what is set to a higher level."""

    def __init__(self, levels: LogLevels) -> None:
        super().__init__()
        self._levels = levels

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is logged."""
        return not self._levels.silences(record)


def _facts(record: logging.LogRecord) -> list[tuple[str, object]]:
    """The facts of a log line that levels apply to, as in `topic=%s`."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    return [(name, arguments[at]) for at, name in _fact_names(str(record.msg)) if at < len(arguments)]


@cache
def _fact_names(text: str) -> list[tuple[int, str]]:
    """Where the arguments of a log line's text stand that are such facts; the broker has a fixed number of texts."""
    names = enumerate(_PLACEHOLDER.findall(text))
    return [(at, name) for at, name in names if name in _SCOPES_OF_FACTS]


def _specificity(pattern: str) -> tuple[bool, int]:
    return not _WILDCARDS.search(pattern), len(_WILDCARDS.sub("", pattern))


def _matcher(pattern: str) -> Callable[[str], object]:
    # fnmatch builds expressions that resist hostile patterns; brackets, which it interprets, are escaped.
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]"))).match


def _check(rule: LogLevelRule, tenant: str) -> None:
    if rule.scope not in LOG_SCOPES:
        raise InvalidArgument(f"scope is {', '.join(LOG_SCOPES)}, not {shown(rule.scope)}")
    if rule.level not in LOG_LEVELS:
        raise InvalidArgument(f"level is {', '.join(LOG_LEVELS)}, not {shown(rule.level)}")
    if rule.scope == _OWN and (rule.pattern or tenant != DEFAULT_TENANT):
        raise InvalidArgument("the broker's own level has no pattern, and is set by sessions of the default tenant")
    if rule.scope != _OWN and not 0 < len(rule.pattern) <= GROUP_NAME_CHARS_MAX:
        raise InvalidArgument(f"a pattern has 1 to {GROUP_NAME_CHARS_MAX} characters, not {len(rule.pattern)}")
    if "/" in rule.pattern:
        raise InvalidArgument(f"a pattern is about the session's tenant: leave the tenant out of {shown(rule.pattern)}")
