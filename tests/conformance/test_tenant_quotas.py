"""Quotas, rates and deletion of tenants, over the native protocol and over HTTP, with a real server."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice

import pytest
from tests.http_client import EventReader, HttpClient, http_server, native_url_of, needs_http, url_of

import headrace
from headrace.errors import QuotaExceeded, TenantExists, TenantNotEmpty, TenantNotFound
from headrace.server import EmbeddedServer

pytestmark = needs_http

names = (f"tenant-{number}" for number in count())


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with http_server() as served:
        yield served


@pytest.fixture
def http(server: EmbeddedServer) -> Iterator[HttpClient]:
    client = HttpClient(url_of(server))
    yield client
    client.close()


@pytest.fixture
def admin(server: EmbeddedServer) -> Iterator[headrace.Bus]:
    with headrace.connect(native_url_of(server)) as bus:
        yield bus


@pytest.fixture
def tenant() -> str:
    return next(names)


def of(server: EmbeddedServer, tenant: str, **more: float) -> headrace.Bus:
    return headrace.connect(native_url_of(server), tenant=tenant, **more)  # type: ignore[arg-type]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_tenant_as_a_resource(http: HttpClient, tenant: str) -> None:
    path = f"/v1/tenants/{tenant}"
    made = http.post("/v1/tenants", {"tenant": tenant, "description": "A customer", "quotas": {"topics": 1}})
    assert (made.status, made.json["quotas"]) == (201, {"topics": 1})
    assert http.post("/v1/tenants", {"tenant": tenant}).code == "tenant_exists"
    assert http.post("/v1/tenants", {"tenant": "x", "quotas": {"topcis": 1}}).status == 422
    listed = http.get("/v1/tenants?limit=1000").json["tenants"]
    assert tenant in [one["tenant"] for one in listed]
    changed = http.ask("PATCH", path, {"quotas": {"topics": None, "groups": 2}}).json
    assert (changed["quotas"], changed["description"]) == ({"groups": 2}, "A customer")
    assert http.get(f"{path}/usage").json["limits"] == {"groups": 2}
    assert http.ask("DELETE", path).status == 204
    assert http.get(path).code == "tenant_not_found"


def test_quotas_over_both_gateways(server: EmbeddedServer, http: HttpClient, admin: headrace.Bus, tenant: str) -> None:
    admin.tenants.create(tenant, quotas={"topics": 1, "connections": 3})
    with pytest.raises(TenantExists):
        admin.tenants.create(tenant)
    with of(server, tenant) as bus:
        bus.create_topic("orders")
        with pytest.raises(QuotaExceeded) as refused:
            bus.create_topic("bills")
        assert refused.value.details == {"quota": "topics", "limit": 1, "usage": 1}
        reply = http.ask("POST", "/v1/topics", {"topic": "bills"}, headers={"Headrace-Tenant": tenant})
        assert (reply.status, reply.code) == (403, "quota_exceeded")
        assert reply.json["details"] == {"quota": "topics", "limit": 1, "usage": 1}
        assert not reply.json["retryable"]
        with of(server, tenant), pytest.raises(QuotaExceeded, match="connections"):
            of(server, tenant)
        usage = bus.tenants.usage().usage
        assert (usage.topics, usage.connections in (2, 3)) == (1, True), "one that was refused does not count"


def test_publishing_beyond_the_rate_waits(server: EmbeddedServer, admin: headrace.Bus, tenant: str) -> None:
    admin.tenants.create(tenant, quotas={"messages_in": 200})
    with of(server, tenant, timeout=30) as bus:
        with bus.producer("orders") as producer:
            for number in range(300):
                producer.send(b"%d" % number)
        assert bus.describe_topic("orders").partitions[0].next_offset == 300
        assert bus.tenants.usage().throttled_us > 0


def test_http_waits_and_is_refused_only_when_it_would_wait_too_long(
    http: HttpClient, admin: headrace.Bus, tenant: str
) -> None:
    admin.tenants.create(tenant, quotas={"messages_in": 10})
    own, path = {"Headrace-Tenant": tenant}, "/v1/topics/orders/messages"
    assert http.ask("POST", path, [{"value": number} for number in range(14)], own).status == 202
    assert admin.tenants.usage(tenant).throttled_us > 0
    other = HttpClient(http.url)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(other.ask, "POST", path, [{"value": number} for number in range(300)], own)
        deadline = time.monotonic() + 30
        while (reply := http.ask("POST", path, {"value": 1}, own)).status != 429:
            assert time.monotonic() < deadline
        assert reply.code == "throttled"
        assert int(reply.headers["retry-after"]) > 10
        assert reply.json["retryable"]
        admin.tenants.alter(tenant, quotas={"messages_in": None})
        assert waiting.result().status == 202, "it goes on at once when the rate is raised"
    other.close()


def test_streams_pause_over_both_gateways(
    server: EmbeddedServer, http: HttpClient, admin: headrace.Bus, tenant: str
) -> None:
    admin.tenants.create(tenant)
    with of(server, tenant) as bus:
        for _ in range(30):
            bus.publish_many("orders", [b"x"] * 10)
        admin.tenants.alter(tenant, quotas={"messages_out": 1})
        with bus.subscribe("orders", start="earliest", timeout=0.3) as messages:
            assert len(list(messages)) == 10, "one batch, which is worth ten seconds"
        path = "/v1/topics/orders/messages?start=earliest"
        reader = EventReader(http.url, path, **{"Headrace-Tenant": tenant})
        with bus.subscribe("orders", start="earliest", timeout=30) as messages, ThreadPoolExecutor() as pool:
            came = pool.submit(reader.take, 300)
            time.sleep(0.3)
            assert not came.done(), "sessions of a tenant share its rate"
            admin.tenants.alter(tenant, quotas={"messages_out": None})
            assert len(came.result()) == 300
            assert len(list(islice(messages, 300))) == 300
        reader.close()


def test_throttled_transactions_and_publishes_are_repeated(
    server: EmbeddedServer, admin: headrace.Bus, tenant: str
) -> None:
    admin.tenants.create(tenant, quotas={"messages_in": 1})
    with of(server, tenant, timeout=30) as bus, ThreadPoolExecutor() as pool:

        def commit() -> None:
            with bus.transaction("load") as transaction:
                transaction.publish("orders", b"staged")

        first = pool.submit(bus.publish_many, "bills", [b"x"] * 100)
        wait_until(lambda: admin.tenants.usage(tenant).throttled_us > 0)
        others = [pool.submit(commit), pool.submit(bus.publish, "orders", b"published")]
        time.sleep(0.5)
        admin.tenants.alter(tenant, quotas={"messages_in": None})
        for one in (first, *others):
            one.result()
        assert bus.describe_topic("orders").partitions[0].next_offset == 2


def test_a_throttled_request_for_two_partitions_tells_what_was_stored(
    http: HttpClient, admin: headrace.Bus, tenant: str
) -> None:
    admin.tenants.create(tenant, quotas={"messages_in": 10})
    own, path = {"Headrace-Tenant": tenant}, "/v1/topics/orders/messages"
    assert http.ask("POST", "/v1/topics", {"topic": "orders", "settings": {"partitions": 2}}, own).status == 201
    messages = [{"value": number, "partition": number % 2} for number in range(400)]
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(http.ask, "POST", path, messages, own)
        wait_until(lambda: admin.tenants.usage(tenant).throttled_us > 0)
        time.sleep(0.3)
        admin.tenants.alter(tenant, quotas={"messages_in": None})
        reply = sending.result()
    assert (reply.status, reply.code) == (429, "throttled")
    assert [one["count"] for one in reply.json["details"]["receipts"]] == [200]
    assert reply.json["detail"].startswith("200 of 400 messages were stored")
    assert "nothing was done" not in reply.json["detail"]
    key = {**own, "Idempotency-Key": tenant}
    assert http.ask("POST", path, messages, key).json["count"] == 400


def test_deleting_ends_connections_and_streams(
    server: EmbeddedServer, http: HttpClient, admin: headrace.Bus, tenant: str
) -> None:
    admin.tenants.create(tenant)
    bus = of(server, tenant)
    bus.publish("orders", b"x")
    reader = EventReader(http.url, "/v1/topics/orders/messages?start=earliest", **{"Headrace-Tenant": tenant})
    assert len(reader.take(1)) == 1
    with pytest.raises(TenantNotEmpty):
        admin.tenants.delete(tenant)
    bus.close()
    admin.tenants.delete(tenant, cascade=True)
    for _ in reader:
        pass  # until the stream ends
    reader.close()
    with pytest.raises(TenantNotFound):
        admin.tenants.describe(tenant)


def test_two_tenants_that_publish_at_once_keep_their_order(server: EmbeddedServer, admin: headrace.Bus) -> None:
    tenants = [next(names) for _ in range(3)]

    def publish(tenant: str) -> list[bytes | None]:
        with of(server, tenant, timeout=60) as bus, bus.producer("orders") as producer:
            for number in range(3000):
                producer.send(b"%s %d" % (tenant.encode(), number))
            producer.flush()
            with bus.subscribe("orders", start="earliest", timeout=30) as messages:
                return [message.value for message in islice(messages, 3000)]

    with ThreadPoolExecutor() as pool:
        for tenant, values in zip(tenants, pool.map(publish, tenants), strict=True):
            assert values == [b"%s %d" % (tenant.encode(), number) for number in range(3000)]
    assert admin.tenants.usage(tenants[0]).usage.topics == 1


def test_metrics_tell_of_tenants(http: HttpClient, admin: headrace.Bus, tenant: str) -> None:
    admin.tenants.create(tenant, quotas={"topics": 7})
    text = http.get("/metrics").body.decode()
    assert f'headrace_tenant_usage{{tenant="{tenant}",resource="topics"}} 0' in text
    assert f'headrace_tenant_quota{{tenant="{tenant}",quota="topics"}} 7' in text
    own = http.ask("GET", "/metrics", None, {"Headrace-Tenant": tenant}).body.decode()
    assert 'tenant="default"' not in own
    assert f'tenant="{tenant}"' in own
