"""What content queries may cost: for a message in all routes of a topic together, in a loop turn, and in a read."""

from collections.abc import Generator
from typing import Any

import pytest

from headrace.broker.route_facts import RouteStored
from headrace.broker.route_forwarder import ForwarderQueue
from headrace.broker.route_table import CompiledRoute, RouteTable, RoutingDecision
from headrace.engines.derived_partition import DerivedPartition
from headrace.model.batch import Columns
from headrace.model.content.decoded_values import DecodedValues
from headrace.model.content.matcher import Selection, _BytesMatcher, _PathMatcher, compile_query
from headrace.model.content.query import ContentQuery
from headrace.model.limits import CONTENT_STEPS_MAX, ROUTE_STEPS_MAX
from headrace.model.reading import Fetch
from headrace.model.requests import Publish, TopicCreate
from headrace.model.route_requests import RouteDefinition, RouteExplain, RouteSet
from headrace.testing.workbench import Workbench

HOSTILE = b'{"a":' * 126 + b"1" + b"}" * 126
ONE_GO = CONTENT_STEPS_MAX + 8192
"""A message's budget for one query, and what may have been done before it came: nothing is interrupted."""


def hostile_path(number: int) -> ContentQuery:
    return ContentQuery(jsonpath=f"$..[?@..[?@..[?@..z{number}]]]")


class Meter:
    """Counts the steps that queries take, in all and within each call of some function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.total = self.calls = 0
        self.within: list[int] = []
        for kind in (_PathMatcher, _BytesMatcher):
            self._count(kind)

    def _count(self, kind: Any) -> None:
        select = kind.select

        def counted(*given: Any, **named: Any) -> Selection:
            selection: Selection = select(*given, **named)
            self.total += selection.steps
            self.calls += 1
            return selection

        self._patch.setattr(kind, "select", counted)

    def watch(self, owner: Any, name: str) -> None:
        """Note how many steps are taken within each call."""
        call = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            before = self.total
            try:
                return call(*given, **named)
            finally:
                self.within.append(self.total - before)

        self._patch.setattr(owner, name, watched)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(monkeypatch)


def routed(count: int) -> Workbench:
    bench = Workbench()
    bench.ask(TopicCreate("in.errors"))
    for number in range(count):
        bench.ask(RouteSet(RouteDefinition(f"r{number}", ["out"], source="in", content=hostile_path(number))))
    return bench


def test_all_routes_of_a_topic_have_one_budget_for_a_message(meter: Meter) -> None:
    bench = routed(100)
    meter.watch(ForwarderQueue, "_run")
    bench.ask(Publish("in", 0), bench.batch([HOSTILE]).data)
    assert CONTENT_STEPS_MAX < meter.total <= ROUTE_STEPS_MAX
    assert max(meter.within) <= ONE_GO, "other requests are served between two queries"
    (message,) = [message for batch in bench.batches("in.errors") for message in batch.messages()]
    assert message.value == HOSTILE
    assert len(message.headers["headrace-route-name"].split(b", ")) == 100, "none of them could decide"
    bench.ask(Publish("in", 0), bench.batch([b'{"a": {"b": {"c": {"z7": 1}}}}']).data)
    assert len(bench.values("out")) == 1


def test_many_messages_take_several_turns(meter: Meter) -> None:
    bench = routed(5)
    meter.watch(ForwarderQueue, "_run")
    bench.ask(Publish("in", 0), bench.batch([HOSTILE] * 10 + [b'{"a": [{"b": 1}]}'] * 1000).data)
    assert len(bench.values("in.errors")) == 10
    assert meter.total <= 10 * ROUTE_STEPS_MAX + 5 * 1010 * 60
    assert max(meter.within) <= ONE_GO


def test_to_explain_has_the_same_budget(meter: Meter) -> None:
    bench = routed(100)
    told = bench.ask(RouteExplain("in", HOSTILE))
    assert CONTENT_STEPS_MAX < meter.total <= ROUTE_STEPS_MAX
    assert [one.name for one in told.routes] == sorted(f"r{number}" for number in range(100))
    assert not any(one.is_taken for one in told.routes)
    assert all("too many steps" in one.reason for one in told.routes)


def test_to_explain_goes_in_slices(meter: Meter) -> None:
    bench = routed(3)
    bench.begin(RouteExplain("in", HOSTILE))
    assert 0 < meter.total <= CONTENT_STEPS_MAX
    bench.run()
    assert meter.total > CONTENT_STEPS_MAX


def table_of(*ids: int) -> RouteTable:
    table = RouteTable()
    for id in ids:
        definition = RouteDefinition(f"r{id}", ["out"], source="in", content=hostile_path(id))
        table.add(CompiledRoute(RouteStored(definition, id, 0, 1, {0: 0})))
    return table


def finish(steps: Generator[int, None, RoutingDecision]) -> RoutingDecision:
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            decision: RoutingDecision = ended.value
            return decision


def test_the_same_routes_fail_after_a_restart_whatever_their_order() -> None:
    """A fifth of the budget for each: the first routes decide, and the last ones cannot."""
    value = b'{"a":' * 20 + b"1" + b"}" * 20
    outcomes = []
    for ids in ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]):
        decision = finish(table_of(*ids).decide(Columns([value]), set()))
        outcomes.append([route.id for _, route in decision.failed])
    assert outcomes[0] == outcomes[1]
    assert 0 < len(outcomes[0]) < 6
    assert 1 not in outcomes[0]


@pytest.mark.parametrize("query", [{"regex": "(a|b)*c$"}, {"jsonpath": "$..[?@ == 7]"}])
def test_queries_share_the_budgets_of_messages(query: dict[str, Any]) -> None:
    matcher, values = compile_query(ContentQuery(**query)), [b"[[7, 8], 9]", b"[" + b"1, " * 200 + b"7]", b"[7]"]
    budgets = [1000] * 3
    first = matcher.select(DecodedValues(values), budgets=budgets)
    assert not first.failed
    assert all(0 < left < 1000 for left in budgets)
    assert sum(1000 - left for left in budgets) == pytest.approx(first.steps, abs=3)
    budgets[1] = 20
    assert matcher.select(DecodedValues(values), budgets=budgets).failed == [1]
    assert matcher.select(DecodedValues(values), 0, stop=1).end == 1


@pytest.mark.parametrize("together", [1, 100], ids=["batches of one", "one batch"])
def test_one_read_of_a_view_takes_few_steps(meter: Meter, together: int) -> None:
    bench = Workbench()
    bench.ask(TopicCreate("in"))
    bench.ask(TopicCreate("view", {"view_of": "in", "view_query": {"jsonpath": "$..[?@..[?@..zz]]"}}))
    for _ in range(100 // together):
        bench.ask(Publish("in", 0), bench.batch([HOSTILE] * together).data)
    meter.watch(DerivedPartition, "read")
    offset = 0
    while offset < 100:
        offset = bench.ask(Fetch("view", 0, offset)).answer.next_offset
    assert meter.total > 20 * ONE_GO, "the messages take long"
    assert max(meter.within) <= ONE_GO
