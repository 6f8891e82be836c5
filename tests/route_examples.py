"""An example of every route of HTTP, about the things that the examples of requests name, and what it asks the broker.

The matrix of access takes them from here; a new route without an example fails it.
"""

import json
from collections.abc import Collection
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

from tests.access_stage import NAMES, renamed
from tests.request_examples import EXAMPLES

from headrace.model.job_requests import RESULTS_TOPIC
from headrace.model.reading import Fetch
from headrace.model.request import Request

_BY_NAME = {type(example).__name__: example for example in EXAMPLES}
_HELD = [{"partition": 0, "offset": 0, "lease": 1}]
_BINDING = {"binding": {"role": "observer", "identity": "ada"}}
_JOB = "0-0-l6bdQ2pV0hXo_f5A"
_ROUTE = {"source": "orders", "targets": ["archive"], "all": True}
_T, _S = "/v1/topics/orders", "/v1/topics/orders/subscriptions/workers"
_EVENTS = {"Accept": "text/event-stream"}
_NDJSON = {"Accept": "application/x-ndjson"}
FORM = "application/x-www-form-urlencoded"


class RouteExample(NamedTuple):
    """A request to a path."""

    parts: list[str]
    """The parts of the path."""
    asks: list[Request[Any]]
    """The requests to the broker that it makes, all of which have to be allowed."""
    body: Any = None
    query: str = ""
    headers: dict[str, str] = {}  # noqa: RUF012 nobody changes it

    def path(self, suffix: str, names: Collection[str] = NAMES) -> str:
        """The path with other names."""
        path = "/".join(quote(renamed(part, suffix, names=names), safe=":*") for part in self.parts)
        query = {name: renamed(text, suffix, names=names) for name, text in parse_qsl(self.query)}
        return path + (f"?{urlencode(query)}" if query else "")

    def encoded(self, suffix: str, host: str, names: Collection[str] = NAMES) -> tuple[bytes | None, dict[str, str]]:
        """The body with other names, and the headers."""
        if self.body is None:
            return None, self.headers
        if self.headers.get("Content-Type") == FORM:
            topic = {"hub.topic": f"{host}/v1/topics/{renamed('orders', suffix, names=names)}/messages"}
            return urlencode({**self.body, **topic}).encode(), self.headers
        body = json.dumps(renamed(self.body, suffix, names=names))
        return body.encode(), {"Content-Type": "application/json", **self.headers}


def _of(path: str, asks: str, body: Any = None, query: str = "", **headers: str) -> RouteExample:
    given = {name.replace("_", "-"): text for name, text in headers.items()}
    return RouteExample(path.split("/"), [_BY_NAME[name] for name in asks.split()], body, query, given)


_HUB = {"hub.mode": "subscribe", "hub.callback": "https://receiver.invalid/"}

ROUTE_EXAMPLES: dict[str, list[RouteExample]] = {
    "GET /v1/topics": [_of("/v1/topics", "TopicList"), _of("/v1/topics", "TopicList", query="pattern=orders")],
    "POST /v1/topics": [_of("/v1/topics", "TopicCreate", {"topic": "orders"})],
    "GET /v1/topics/{topic}": [_of(_T, "TopicDescribe")],
    "PATCH /v1/topics/{topic}": [_of(_T, "TopicAlter", {"settings": {"retain_bytes": 1 << 30}})],
    "DELETE /v1/topics/{topic}": [_of(_T, "TopicDelete")],
    "POST /v1/topics/{topic}/trims": [_of(f"{_T}/trims", "TopicTrim", {"offsets": {"0": 0}})],
    "GET /v1/topics/{topic}/offsets": [_of(f"{_T}/offsets", "Offsets")],
    "GET /v1/groups": [_of("/v1/groups", "GroupList")],
    "GET /v1/groups/{group}": [_of("/v1/groups/billing", "GroupDescribe")],
    "DELETE /v1/groups/{group}": [_of("/v1/groups/billing", "GroupDelete")],
    "POST /v1/groups/{group}/seeks": [
        _of("/v1/groups/billing/seeks", "GroupSeek", {"topic": "orders", "to": "earliest"})
    ],
    "POST /v1/groups/{group}/commits": [
        _of("/v1/groups/billing/commits", "Commit", {"topic": "orders", "position": "0:0"})
    ],
    "GET /v1/broker": [_of("/v1/broker", "Info")],
    "POST /v1/topics/{topic}/messages": [
        _of(f"{_T}/messages", "Publish", {"value": 1}),
        _of(f"{_T}/messages", "PublishOnce", {"value": 1}, Idempotency_Key="k"),
        _of(f"{_T}/messages", "Publish", {"specversion": "1.0", "id": "1", "source": "/x", "type": "t"},
            Content_Type="application/cloudevents+json"),
    ],
    "GET /v1/topics/{topic}/partitions/{partition}/messages": [_of(f"{_T}/partitions/0/messages", "Fetch")],
    "GET /v1/topics/{topic}/partitions/{partition}/messages/{offset}": [_of(f"{_T}/partitions/0/messages/0", "Fetch")],
    "GET /v1/topics/{topic}/messages": [
        _of(f"{_T}/messages", "StreamOpen", **_EVENTS),
        _of(f"{_T}/messages", "StreamOpen", **_NDJSON),
        _of(f"{_T}/messages", "StreamOpen GroupDescribe", query="group=billing", **_EVENTS),
        _of(f"{_T}/messages", "StreamOpen Commit", query="group=billing&position=0:0", **_EVENTS),
    ],
    "GET /v1/topics/{topic}/keys/{key}/history": [_of(f"{_T}/keys/k/history", "History")],
    "GET /v1/subscriptions": [_of("/v1/subscriptions", "SubscriptionList")],
    "GET /v1/topics/{topic}/subscriptions": [_of(f"{_T}/subscriptions", "SubscriptionList")],
    "POST /v1/topics/{topic}/subscriptions": [
        _of(f"{_T}/subscriptions", "SubscriptionCreate", {"subscription": "workers"})
    ],
    "GET /v1/topics/{topic}/subscriptions/{subscription}": [_of(_S, "SubscriptionDescribe")],
    "PATCH /v1/topics/{topic}/subscriptions/{subscription}": [
        _of(_S, "SubscriptionAlter", {"settings": {"lease_seconds": 10}})
    ],
    "DELETE /v1/topics/{topic}/subscriptions/{subscription}": [_of(_S, "SubscriptionDelete")],
    "POST /v1/topics/{topic}/subscriptions/{subscription}/resets": [
        _of(f"{_S}/resets", "SubscriptionReset", {"start": "latest"})
    ],
    "GET /v1/topics/{topic}/subscriptions/{subscription}/lag": [_of(f"{_S}/lag", "SubscriptionDescribe")],
    "POST /v1/topics/{topic}/subscriptions/{subscription}/leases": [_of(f"{_S}/leases", "Lease", {"messages_max": 1})],
    "POST /v1/topics/{topic}/subscriptions/{subscription}/acks": [_of(f"{_S}/acks", "Ack", {"messages": _HELD})],
    "POST /v1/topics/{topic}/subscriptions/{subscription}/extensions": [
        _of(f"{_S}/extensions", "Extend", {"messages": _HELD})
    ],
    "POST /v1/topics/{topic}/subscriptions/{subscription}/releases": [
        _of(f"{_S}/releases", "Release", {"messages": _HELD})
    ],
    "POST /v1/topics/{topic}/subscriptions/{subscription}/rejections": [
        _of(f"{_S}/rejections", "Reject", {"messages": _HELD})
    ],
    "GET /v1/topics/{topic}/subscriptions/{subscription}/messages": [_of(f"{_S}/messages", "Find")],
    "GET /v1/topics/{topic}/messages/{id}": [_of(f"{_T}/messages/0:0", "Find", query="subscription=workers")],
    "PATCH /v1/topics/{topic}/messages/{id}": [_of(f"{_T}/messages/0:0", "Edit", {"shift_us": 1})],
    "DELETE /v1/topics/{topic}/messages/{id}": [_of(f"{_T}/messages/0:0", "Edit")],
    "POST /v1/topics/{topic}/subscriptions/{subscription}/edits": [
        _of(f"{_S}/edits", "EditMatching", {"change": {"shift_us": 1}})
    ],
    "GET /v1/topics/{topic}/subscriptions/{subscription}/forecast": [
        _of(f"{_S}/forecast", "Forecast", query="start=2030-01-01T00:00:00Z")
    ],
    "POST /v1/topics/{topic}/subscriptions/{subscription}/redrives": [_of(f"{_S}/redrives", "Redrive", {})],
    "GET /v1/schedules": [
        _of("/v1/schedules", "ScheduleList"), _of("/v1/schedules", "ScheduleList", query="topic=orders")
    ],
    "GET /v1/schedules/{name}": [_of("/v1/schedules/nightly", "ScheduleList")],
    "PUT /v1/schedules/{name}": [
        _of("/v1/schedules/nightly", "ScheduleSet", {"topic": "orders", "when": "@yearly", "value": 1})
    ],
    "PATCH /v1/schedules/{name}": [_of("/v1/schedules/nightly", "SchedulePause", {"paused": True})],
    "DELETE /v1/schedules/{name}": [_of("/v1/schedules/nightly", "ScheduleRemove")],
    "POST /v1/schedules/{name}/runs": [_of("/v1/schedules/nightly/runs", "ScheduleRun")],
    "GET /v1/schedules/{name}/runs": [_of("/v1/schedules/nightly/runs", "ScheduleNext")],
    "POST /v1/transactions": [
        _of("/v1/transactions", "TransactionBegin TransactionStage TransactionCommit",
            {"transaction": "import", "messages": [{"topic": "orders", "value": 1}], "group": "billing",
             "offsets": [{"topic": "orders", "partition": 0, "offset": 0}]}),
    ],
    "GET /v1/tenants": [_of("/v1/tenants", "TenantList")],
    "POST /v1/tenants": [_of("/v1/tenants", "TenantCreate", {"tenant": "acme"})],
    "GET /v1/tenants/{tenant}": [_of("/v1/tenants/acme", "TenantDescribe")],
    "PATCH /v1/tenants/{tenant}": [_of("/v1/tenants/acme", "TenantAlter", {"description": "x"})],
    "DELETE /v1/tenants/{tenant}": [_of("/v1/tenants/acme", "TenantDelete")],
    "GET /v1/tenants/{tenant}/usage": [_of("/v1/tenants/acme/usage", "TenantUsageDescribe")],
    "GET /v1/cluster": [_of("/v1/cluster", "ClusterDescribe")],
    "POST /v1/cluster/moves": [_of("/v1/cluster/moves", "ClusterMove", {"shard": 0, "node": "b"})],
    "POST /v1/cluster/nodes/{node}/drain": [_of("/v1/cluster/nodes/b/drain", "ClusterDrain", {})],
    "POST /v1/cluster/upgrade": [_of("/v1/cluster/upgrade", "ClusterUpgrade")],
    "GET /v1/webhooks": [
        _of("/v1/webhooks", "WebhookList"), _of("/v1/webhooks", "WebhookList", query="topic=orders")
    ],
    "GET /v1/webhooks/{name}": [_of("/v1/webhooks/billing", "WebhookDescribe")],
    "PUT /v1/webhooks/{name}": [
        _of("/v1/webhooks/billing", "WebhookSet", {"topic": "orders", "url": "https://receiver.invalid/"})
    ],
    "PATCH /v1/webhooks/{name}": [_of("/v1/webhooks/billing", "WebhookAlter", {"concurrency": 2})],
    "DELETE /v1/webhooks/{name}": [_of("/v1/webhooks/billing", "WebhookDelete")],
    "GET /v1/webhooks/{name}/deliveries": [_of("/v1/webhooks/billing/deliveries", "WebhookDeliveries")],
    "POST /v1/webhooks/{name}/test": [_of("/v1/webhooks/billing/test", "WebhookTest")],
    "POST /v1/webhooks/{name}/pause": [_of("/v1/webhooks/billing/pause", "WebhookPause", {})],
    "POST /v1/webhooks/{name}/resume": [_of("/v1/webhooks/billing/resume", "WebhookPause")],
    "POST /v1/hub": [
        _of("/v1/hub", "WebSubSubscribe", _HUB, Content_Type=FORM),
        _of("/v1/hub", "WebSubUnsubscribe", {**_HUB, "hub.mode": "unsubscribe"}, Content_Type=FORM),
        _of("/v1/hub", "TopicDescribe", {"hub.mode": "publish"}, Content_Type=FORM),
    ],
    "POST /v1/topics/{topic}/jobs": [_of(f"{_T}/jobs", "Publish ResultsOpen", {"value": 1})],
    "GET /v1/results/{job}": [
        RouteExample(f"/v1/results/{_JOB}".split("/"), [Fetch(RESULTS_TOPIC, 0, 0)])
    ],
    "POST /v1/topics/{topic}/subscriptions/{subscription}/results": [
        _of(f"{_S}/results", "JobFinish", {"message": _HELD[0], "job": _JOB, "value": 1})
    ],
    "GET /v1/routes": [_of("/v1/routes", "RouteList"), _of("/v1/routes", "RouteList", query="topic=orders")],
    "POST /v1/routes": [_of("/v1/routes", "RouteSet", {"name": "copies", **_ROUTE})],
    "GET /v1/routes/{name}": [_of("/v1/routes/copies", "RouteList")],
    "PUT /v1/routes/{name}": [_of("/v1/routes/copies", "RouteSet", _ROUTE)],
    "DELETE /v1/routes/{name}": [_of("/v1/routes/copies", "RouteRemove")],
    "POST /v1/route-explanations": [
        _of("/v1/route-explanations", "RouteExplain", {"source": "orders", "value": {"region": "eu"}})
    ],
    "GET /v1/subjects": [_of("/v1/subjects", "SwitchboardDescribe")],
    "POST /v1/subjects/{subject}/messages": [_of("/v1/subjects/orders.eu/messages", "SubjectPublish", {"value": 1})],
    "GET /v1/subjects/{subject}/messages": [_of("/v1/subjects/orders.*/messages", "SubjectSubscribe", **_EVENTS)],
    "POST /v1/requests/{subject}": [_of("/v1/requests/prices.get", "RequestSend", {"id": 1})],
    "GET /v1/services": [_of("/v1/services", "ServiceList"), _of("/v1/services", "ServiceList", query="name=shop")],
    "GET /v1/services/{name}": [_of("/v1/services/shop", "ServiceDescribe")],
    "GET /v1/services/{name}/instances/{instance}": [_of("/v1/services/shop/instances/one", "ServiceDescribe")],
    "PUT /v1/services/{name}/instances/{instance}": [_of("/v1/services/shop/instances/one", "ServiceRegister", {})],
    "DELETE /v1/services/{name}/instances/{instance}": [
        _of("/v1/services/shop/instances/two", "ServiceDescribe ServiceDeregister")
    ],
    "GET /v1/errors": [_of("/v1/errors", "ErrorList", query="service=shop")],
    "POST /v1/errors": [
        _of("/v1/errors", "ErrorReport",
            {"service": "shop", "instance": "one", "errors": [{"code": "failed", "message": "it failed"}]}),
    ],
    "GET /v1/configuration": [_of("/v1/configuration", "LogLevelList ServiceList Info")],
    "PATCH /v1/configuration": [_of("/v1/configuration", "ServicePolicyAlter", {"require_registration": False})],
    "GET /v1/configuration/log-levels": [_of("/v1/configuration/log-levels", "LogLevelList")],
    "PUT /v1/configuration/log-levels": [
        _of("/v1/configuration/log-levels", "LogLevelSet", {"scope": "topic", "pattern": "none", "level": "error"})
    ],
    "DELETE /v1/configuration/log-levels": [_of("/v1/configuration/log-levels", "LogLevelReset")],
    "POST /v1/events": [_of("/v1/events", "EventsRecord")],
    "GET /v1/auth": [_of("/v1/auth", "SecurityDescribe")],
    "PATCH /v1/auth": [_of("/v1/auth", "SecurityAlter", {"enabled": True})],
    "PUT /v1/auth/roles/{name}": [
        _of("/v1/auth/roles/auditor", "RoleSet",
            {"grants": [{"verbs": ["consume"], "resource": "topic", "patterns": ["x"]}]}),
    ],
    "DELETE /v1/auth/roles/{name}": [_of("/v1/auth/roles/auditor", "RoleRemove")],
    "POST /v1/auth/bindings": [_of("/v1/auth/bindings", "BindingAdd", _BINDING)],
    "POST /v1/auth/binding-removals": [_of("/v1/auth/binding-removals", "BindingRemove", _BINDING)],
    "POST /v1/auth/tokens": [_of("/v1/auth/tokens", "TokenCreate", {"identity": "ada"})],
    "GET /v1/auth/tokens": [_of("/v1/auth/tokens", "TokenList")],
    "DELETE /v1/auth/tokens/{id}": [_of("/v1/auth/tokens/000000000000", "TokenRevoke")],
    "POST /v1/auth/explanations": [
        _of("/v1/auth/explanations", "AccessExplain",
            {"identity": "ada", "verb": "publish", "resource": "topic", "name": "orders"}),
    ],
    "GET /v1/audit": [_of("/v1/audit", "AuditDescribe")],
    "GET /metrics": [_of("/metrics", "MetricsCollect")],
    "GET /v1/asyncapi.json": [_of("/v1/asyncapi.json", "TopicList")],
    "GET /v1/asyncapi": [_of("/v1/asyncapi", "TopicList")],
}  # fmt: skip
"""By method and path."""
OPEN_TO_ALL = {
    "GET /healthz": "whether the process answers",
    "GET /readyz": "whether it takes requests",
    "GET /v1/openapi.json": "what every broker of this version has",
    "GET /v1/docs": "the same as a page",
    "GET /v1/auth/identity": "tells the session about itself",
    "GET /v1/native": "another protocol, which authenticates",
    "GET /v1/socket": "another protocol, which authenticates",
}
"""Routes that need no permission, and what they tell."""
