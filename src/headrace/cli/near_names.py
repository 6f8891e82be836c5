"""Suggestions for misspelt names of topics, groups, subscriptions, schedules, routes and webhooks."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.model.errors import (
    GroupNotFound,
    HeadraceError,
    RouteNotFound,
    ScheduleNotFound,
    SubscriptionNotFound,
    TopicNotFound,
    WebhookNotFound,
)
from headrace.model.suggestions import did_you_mean

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

_ASK_S = 2.0

_KINDS: dict[type[HeadraceError], tuple[tuple[str, ...], Callable[["Bus", argparse.Namespace], list[str]]]] = {
    TopicNotFound: (("topic", "topics"), lambda bus, _: [each.topic for each in bus.topics()]),
    GroupNotFound: (("group",), lambda bus, _: [each.group for each in bus.groups()]),
    SubscriptionNotFound: (
        ("subscription",),
        lambda bus, given: [each.subscription for each in bus.subscriptions(given.topic)],
    ),
    ScheduleNotFound: (("name",), lambda bus, _: [each.definition.name for each in bus.crons()]),
    RouteNotFound: (("name",), lambda bus, _: [each.definition.name for each in bus.routes.list()]),
    WebhookNotFound: (("name",), lambda bus, _: [each.definition.name for each in bus.webhooks.list()]),
}
"""By error code: which argument holds the name, and how to list the existing names."""


def near_names(error: HeadraceError, given: argparse.Namespace) -> str:
    """A question that offers names that there are; empty if none is like the one given, or nobody tells."""
    if type(error) not in _KINDS or "connect" not in given:
        return ""
    from headrace.cli.connection import broker_url
    from headrace.client._sync.connecting import connect

    places, ask = _KINDS[type(error)]
    try:
        with connect(broker_url(given), timeout=min(given.timeout, _ASK_S)) as bus:
            known = ask(bus, given)
    except HeadraceError:
        return ""  # the user needs the original error, not this one
    for name in _names(given, places):
        if name not in known:
            return did_you_mean(name, known)
    return ""


def _names(given: argparse.Namespace, places: tuple[str, ...]) -> list[str]:
    found = [getattr(given, place) for place in places if getattr(given, place, None)]
    return [str(name) for each in found for name in (each if isinstance(each, list) else [each])]
