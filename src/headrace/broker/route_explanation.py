"""Explains which routes a message takes, and why."""

from collections.abc import Sequence

from headrace.broker.route_table import (
    OVER_BUDGET,
    CompiledRoute,
    content_cost,
    in_budget_order,
    missing_headers,
    subject_text,
)
from headrace.broker.slices import Steps
from headrace.broker.subject_trie import SubjectTrie
from headrace.model.arguments import shown
from headrace.model.content.decoded_values import NOT_JSON, DecodedValues
from headrace.model.headers import header_pairs
from headrace.model.limits import ROUTE_STEPS_MAX
from headrace.model.route import described_condition
from headrace.model.route_requests import SUBJECT_HEADER, RouteExplain, RouteExplained, RouteVerdict

_SLICE_COST = 1000
"""What content queries may cost in one slice, in microseconds, or one query."""


def explain(source: str, routes: Sequence[CompiledRoute], message: RouteExplain) -> Steps:
    """Tell for each route of a source whether it takes a message; returns RouteExplained."""
    verdicts = [
        _verdict(route, message) for route in routes if route.matcher is None and not route.definition.unmatched
    ]
    yield from _by_content(routes, message.value, verdicts)
    is_decided = all(verdict.reason != OVER_BUDGET for verdict in verdicts)
    is_taken = any(verdict.is_taken for verdict in verdicts)
    for route in routes:
        if route.definition.unmatched:
            reason = "another route takes it" if is_taken else "no other route takes it"
            verdicts.append(_told(route, not is_taken and is_decided, reason if is_decided else OVER_BUDGET))
    targets = dict.fromkeys(target for verdict in verdicts if verdict.is_taken for target in verdict.targets)
    verdicts.sort(key=lambda verdict: verdict.name)
    return RouteExplained(source, verdicts, list(targets))


def _told(route: CompiledRoute, is_taken: bool, reason: str) -> RouteVerdict:
    return RouteVerdict(route.name, is_taken, reason, list(route.targets))


def _verdict(route: CompiledRoute, message: RouteExplain) -> RouteVerdict:
    definition = route.definition
    if definition.key is not None or definition.pattern is not None:
        return _by_subject(route, message)
    if definition.headers is not None:
        pairs = header_pairs(message.headers)
        missing = missing_headers(route, pairs)
        is_taken = len(missing) < (len(definition.headers) if definition.headers_match == "any" else 1)
        have = [name for name in definition.headers if name not in missing]
        reason = f"the message has {', '.join(have) or 'none of them'}" + (
            f", and not {', '.join(missing)}" if missing and have else ""
        )
        return _told(route, is_taken, f"{definition.headers_match} of its headers are needed: {reason}")
    return _told(route, True, "it takes every message")


def _by_content(routes: Sequence[CompiledRoute], value: bytes | None, verdicts: list[RouteVerdict]) -> Steps:
    """Ask all content queries, which have one budget as they have when a message is forwarded."""
    decoded, budgets, cost = DecodedValues([value]), [ROUTE_STEPS_MAX], 0
    for route, matcher in in_budget_order(routes):
        selection = matcher.select(decoded, budgets=budgets)
        does = "matches" if selection.matched else "does not match"
        reason = f"the value {does} {described_condition(route.definition)}"
        if selection.failed:
            reason = OVER_BUDGET
        elif not selection.matched and matcher.query.kind != "regex" and decoded.documents()[0] is NOT_JSON:
            reason = "the value is not JSON"
        verdicts.append(_told(route, bool(selection.matched), reason))
        cost += content_cost(selection)
        if cost >= _SLICE_COST:
            cost = 0
            yield


def _by_subject(route: CompiledRoute, message: RouteExplain) -> RouteVerdict:
    definition = route.definition
    named = message.headers.get(SUBJECT_HEADER)
    raw, whence = (message.key, "key") if named is None else (named, f"header {SUBJECT_HEADER}")
    subject = None if raw is None else subject_text(raw)
    if subject is None:
        return _told(route, False, "the message has no subject: neither a header headrace-subject nor a key of text")
    if definition.key is not None:
        is_taken = subject == definition.key
        does = "is" if is_taken else "is not"
        return _told(route, is_taken, f"its {whence} {shown(subject)} {does} {definition.key}")
    assert definition.pattern is not None
    trie = SubjectTrie[str]()
    trie.add(definition.pattern, "", limited=False)
    is_taken = bool(trie.find(subject))
    does = "matches" if is_taken else "does not match"
    return _told(route, is_taken, f"its {whence} {shown(subject)} {does} {definition.pattern}")
