"""Answers without what the session may not see: lists have only what it may describe."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.broker.slices import Steps, in_slices
from headrace.model.leasing import SubscriptionInfo, Subscriptions
from headrace.model.request import Answer, Resource
from headrace.model.requests import GroupInfo, Groups, GroupSummary, TopicInfo, Topics
from headrace.model.route_requests import RouteExplained, RouteInfo, RoutesFound, RouteVerdict
from headrace.model.schedule_requests import ScheduleInfo, Schedules
from headrace.model.service_requests import ErrorsFound, ErrorSummary, ServiceInfo, ServicesFound
from headrace.model.webhook_requests import WebhookInfo, WebhooksFound
from headrace.security.access import SessionAccess

_SLICE = 200
"""Entries of a list that are decided about per slice."""


class ListFilter(NamedTuple):
    """Which entries of a list in an answer a session sees."""

    field: str
    seen: Callable[[SessionAccess, Any], Any]
    """The entry as the session sees it; None if it does not."""
    completed: Callable[[Any], Answer] = lambda answer: answer
    """The answer after its list was filtered, with what follows from that."""


def _topic(access: SessionAccess, info: TopicInfo) -> TopicInfo | None:
    if not access.describes(Resource.TOPIC.value, info.topic):
        return None
    groups = [name for name in info.groups if access.describes(Resource.GROUP.value, name)]
    return replace(info, groups=groups, views=_topics(access, info.views))


def _group(access: SessionAccess, group: GroupSummary) -> GroupSummary | None:
    if not access.describes(Resource.GROUP.value, group.group):
        return None
    return replace(group, topics=_topics(access, group.topics))


def _group_info(access: SessionAccess, info: GroupInfo) -> GroupInfo:
    """A group, without its offsets in topics that the session does not see."""
    return replace(info, places=[one for one in info.places if access.describes(Resource.TOPIC.value, one.topic)])


def _topics(access: SessionAccess, names: list[str]) -> list[str]:
    return [name for name in names if access.describes(Resource.TOPIC.value, name)]


def _subscription(access: SessionAccess, info: SubscriptionInfo) -> SubscriptionInfo | None:
    return info if access.describes(Resource.SUBSCRIPTION.value, info.topic, info.subscription) else None


def _schedule(access: SessionAccess, info: ScheduleInfo) -> ScheduleInfo | None:
    return info if access.describes(Resource.SCHEDULE.value, info.definition.name) else None


def _route(access: SessionAccess, info: RouteInfo) -> RouteInfo | None:
    return info if access.describes(Resource.ROUTE.value, info.definition.name) else None


def _webhook(access: SessionAccess, info: WebhookInfo) -> WebhookInfo | None:
    return info if access.describes(Resource.WEBHOOK.value, info.definition.name) else None


def _verdict(access: SessionAccess, verdict: RouteVerdict) -> RouteVerdict | None:
    return verdict if access.describes(Resource.ROUTE.value, verdict.name) else None


def _explained(found: RouteExplained) -> RouteExplained:
    """Only the targets of routes that the session sees."""
    seen = {target for one in found.routes for target in one.targets}
    return replace(found, targets=[target for target in found.targets if target in seen])


def _service(access: SessionAccess, info: ServiceInfo) -> ServiceInfo | None:
    if not access.describes(Resource.SERVICE.value, info.name):
        return None
    serves = [subject for subject in info.serves if access.describes(Resource.SUBJECT.value, subject)]
    return replace(
        info, produces=_topics(access, info.produces), consumes=_topics(access, info.consumes), serves=serves
    )


def _errors(access: SessionAccess, summary: ErrorSummary) -> ErrorSummary | None:
    """Errors of clients that are no service are for those who see all services of the tenant."""
    names = (summary.service,) if summary.service else ("", "")
    return summary if access.describes(Resource.SERVICE.value, *names) else None


FILTERS: dict[type[Answer] | None, ListFilter] = {
    Topics: ListFilter("topics", _topic),
    Groups: ListFilter("groups", _group),
    Subscriptions: ListFilter("subscriptions", _subscription),
    Schedules: ListFilter("schedules", _schedule),
    RoutesFound: ListFilter("routes", _route),
    RouteExplained: ListFilter("routes", _verdict, _explained),
    WebhooksFound: ListFilter("webhooks", _webhook),
    ServicesFound: ListFilter("services", _service),
    ErrorsFound: ListFilter("services", _errors),
    TopicInfo: ListFilter("", _topic),
    GroupInfo: ListFilter("", _group_info),
    ServiceInfo: ListFilter("", _service),
}
"""By answer. A request that declares `describe` without a field needs one: a test says so."""


def filtered(ports: Ports, access: SessionAccess, outcome: Any) -> Any:
    """The outcome of a request, there or still to come, without what the session may not see."""
    if isinstance(outcome, PendingAnswer):
        pending: PendingAnswer[Any] = PendingAnswer()
        outcome.then(lambda resolved: _resolve(pending, filtered(ports, access, resolved)))
        pending.then(partial(_withdraw, outcome))
        return pending
    chosen = FILTERS.get(type(outcome))
    if chosen is None:
        return outcome  # an error
    if not chosen.field:
        return chosen.seen(access, outcome)
    entries = getattr(outcome, chosen.field)
    if len(entries) <= _SLICE:
        return _kept(access, chosen, outcome, entries)
    return in_slices(ports, _in_slices(access, chosen, outcome, entries))


def _in_slices(access: SessionAccess, chosen: ListFilter, answer: Answer, entries: list[Any]) -> Steps:
    kept: list[Any] = []
    for start in range(0, len(entries), _SLICE):
        if start:
            yield
        kept += [seen for one in entries[start : start + _SLICE] if (seen := chosen.seen(access, one)) is not None]
    return chosen.completed(replace(answer, **{chosen.field: kept}))


def _kept(access: SessionAccess, chosen: ListFilter, answer: Answer, entries: list[Any]) -> Answer:
    kept = [seen for one in entries if (seen := chosen.seen(access, one)) is not None]
    return chosen.completed(replace(answer, **{chosen.field: kept}))


def _resolve(pending: PendingAnswer[Any], outcome: Any) -> None:
    if isinstance(outcome, PendingAnswer):
        outcome.then(pending.resolve)
    else:
        pending.resolve(outcome)


def _withdraw(outcome: PendingAnswer[Any], _: object) -> None:
    """Withdraw a request whose filtered answer was cancelled; without effect on one that was answered."""
    outcome.cancel()
