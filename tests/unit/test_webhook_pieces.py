"""The parts of the delivery that do no I/O: circuit breaker, Retry-After, signatures, permission, shared limits."""

import json
from datetime import UTC, datetime
from email.utils import format_datetime
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from headrace.model.limits import PUSH_REQUESTS_MAX, WEBHOOK_CONCURRENCY_MAX
from headrace.model.message import Message
from headrace.model.webhook import secret_text
from headrace.model.webhook_requests import WebhookDefinition, WebhookDelivery
from headrace.push.circuit_breaker import FAILURES_MAX, OPEN_US_MAX, OPEN_US_MIN, Circuit, CircuitBreaker
from headrace.push.delivery_log import DeliveryLog
from headrace.push.http_client import OutgoingResponse
from headrace.push.leased_messages import LeasedMessage
from headrace.push.receiver_permission import read_permission
from headrace.push.request_formats import DeliverySource, format_request, request_id
from headrace.push.retry_after import RETRY_AFTER_US_MAX, retry_after_us
from headrace.push.shared_limits import LeasedMemory, RequestSlots
from headrace.push.signatures import signature_headers

NOW_US = 1_800_000_000_000_000
SOURCE = DeliverySource("b1", "orders", 7)


# The circuit breaker.

steps = st.lists(st.tuples(st.sampled_from(["ask", "ok", "fail"]), st.integers(0, 2 * OPEN_US_MAX)), max_size=200)


@given(steps)
def test_the_breaker_follows_its_rules_whatever_happens(told: list[tuple[str, int]]) -> None:
    breaker, now_us, in_flight, in_a_row, open_us = CircuitBreaker(), NOW_US, 0, 0, 0
    for step, passed_us in told:
        now_us += passed_us
        before = breaker.circuit
        if step == "ask":
            may = breaker.may_send(now_us, in_flight)
            if before is Circuit.CLOSED:
                assert may
            else:
                assert may is (now_us >= breaker.until_us and in_flight == 0)  # one probe at a time
            in_flight += may
        elif not in_flight:
            continue
        elif step == "ok":
            in_flight -= 1
            closed = breaker.succeeded()
            assert closed is (before is Circuit.HALF_OPEN)
            assert breaker.circuit is (Circuit.OPEN if before is Circuit.OPEN else Circuit.CLOSED)
            if breaker.circuit is Circuit.CLOSED:
                in_a_row = open_us = 0
        else:
            in_flight -= 1
            in_a_row += 1
            opened = breaker.failed(now_us)
            assert opened is (before is Circuit.CLOSED and in_a_row >= FAILURES_MAX)
            if opened or before is Circuit.HALF_OPEN:
                open_us = min(max(2 * open_us, OPEN_US_MIN), OPEN_US_MAX)
                assert breaker.until_us == now_us + open_us
            assert breaker.failures == in_a_row


def test_a_receiver_that_stays_down_is_probed_at_bounded_intervals() -> None:
    breaker, now_us, probes = CircuitBreaker(), NOW_US, []
    for _ in range(FAILURES_MAX):
        breaker.failed(now_us)
    while now_us < NOW_US + 3_600_000_000:
        now_us = breaker.until_us
        assert breaker.may_send(now_us, 0)
        assert not breaker.may_send(now_us, 1)
        breaker.failed(now_us)
        probes.append(breaker.until_us - now_us)
    assert probes[:4] == [2_000_000, 4_000_000, 8_000_000, 16_000_000]
    assert probes[-1] == OPEN_US_MAX
    assert len(probes) < 25


# Retry-After.


@given(st.integers(0, 10**15 - 1) | st.integers(0, 200).map(lambda digits: 10**digits))
def test_seconds_are_bounded(seconds: int) -> None:
    assert retry_after_us(str(seconds), NOW_US) == min(seconds * 1_000_000, RETRY_AFTER_US_MAX)


def test_a_number_too_long_to_be_read_is_a_day() -> None:
    assert retry_after_us("9" * 10_000, NOW_US) == RETRY_AFTER_US_MAX
    assert retry_after_us("0" * 10_000 + "7", NOW_US) == 7_000_000


@given(st.integers(-(10**6), 10**6))
def test_dates_are_bounded_and_never_in_the_past(seconds: int) -> None:
    date = format_datetime(datetime.fromtimestamp(NOW_US / 1e6 + seconds, UTC), usegmt=True)
    assert retry_after_us(date, NOW_US) == min(max(seconds * 1_000_000, 0), RETRY_AFTER_US_MAX)


@given(st.text())
def test_anything_else_is_nothing(text: str) -> None:
    wait_us = retry_after_us(text, NOW_US)
    assert wait_us is None or 0 <= wait_us <= RETRY_AFTER_US_MAX


# Signatures and ids.


bodies = st.dictionaries(st.text(), st.integers() | st.text()).map(lambda one: json.dumps(one).encode())


@given(st.lists(st.binary(min_size=24, max_size=64), min_size=1, max_size=2, unique=True), bodies)
def test_every_secret_verifies_and_no_other(keys: list[bytes], body: bytes) -> None:
    now_us = int(datetime.now(UTC).timestamp()) * 1_000_000
    headers = signature_headers([secret_text(key) for key in keys], "msg_1", now_us, body)
    for key in keys:
        assert Webhook(secret_text(key)).verify(body, headers) == json.loads(body)
    stranger = sha256(b"".join(keys)).digest()
    with pytest.raises(WebhookVerificationError):
        Webhook(secret_text(stranger)).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret_text(keys[0])).verify(body + b" ", headers)


def leased(offset: int, partition: int = 0, attempt: int = 1, value: bytes | None = b"x") -> LeasedMessage:
    return LeasedMessage(Message(offset, value, NOW_US), partition, 1, attempt, 1)


def test_ids_are_the_same_for_the_same_messages_only() -> None:
    assert request_id([leased(5)], SOURCE) == "msg_b1_7_0_5"
    assert request_id([leased(5, attempt=3)], SOURCE) == request_id([leased(5)], SOURCE)
    pairs = [[leased(5), leased(6)], [leased(5), leased(6, 1)], [leased(5), leased(7)], [leased(5)], [leased(6)]]
    assert len({request_id(pair, SOURCE) for pair in pairs}) == len(pairs)
    assert request_id(pairs[0], SOURCE) == request_id([leased(5, attempt=2), leased(6)], SOURCE)
    assert all("." not in request_id(pair, SOURCE) for pair in pairs)


def test_headers_are_printable_whatever_a_message_has() -> None:
    message = Message(3, None, NOW_US, "ключ\r\n".encode(), {"Content-Type": b"text/\r\nx: y"})
    raw = WebhookDefinition("größe", "тема", "https://a/", format="raw", headers={"x-a": "1"})
    request = format_request(raw, [LeasedMessage(message, 0, 1, 2, 1)], DeliverySource("b1", "тема", 7))
    assert all(text.isascii() and text.isprintable() for text in request.headers.values())
    assert (request.body, request.headers["headrace-deleted"], request.headers["headrace-attempt"]) == (
        b"",
        "true",
        "2",
    )
    bad_type = Message(3, b"v", NOW_US, None, {"Content-Type": b"text/\r\nx: y"})
    request = format_request(raw, [LeasedMessage(bad_type, 0, 1, 2, 1)], SOURCE)
    assert request.headers["content-type"] == "application/octet-stream"


# Permission.


@pytest.mark.parametrize(
    ("status", "headers", "granted", "interval_us", "final"),
    [
        (200, {"webhook-allowed-origin": "*"}, True, 0, True),
        (204, {"webhook-allowed-origin": "A.org", "webhook-allowed-rate": "120"}, True, 500_000, True),
        (200, {"webhook-allowed-origin": "b.org, a.org", "webhook-allowed-rate": "*"}, True, 0, True),
        (200, {"webhook-allowed-origin": "b.org"}, False, 0, True),
        (200, {}, False, 0, True),
        (200, {"webhook-allowed-origin": "*", "webhook-allowed-rate": "0"}, False, 0, True),
        (200, {"webhook-allowed-origin": "*", "webhook-allowed-rate": "fast"}, False, 0, True),
        (405, {"webhook-allowed-origin": "*"}, False, 0, True),
        (302, {"webhook-allowed-origin": "*"}, False, 0, True),
        (503, {}, False, 0, False),
        (429, {}, False, 0, False),
    ],
)
def test_permission(status: int, headers: dict[str, str], granted: bool, interval_us: int, final: bool) -> None:
    found = read_permission(OutgoingResponse(status, headers, b"", False), "a.org")
    assert (found.is_granted, found.interval_us, found.is_final) == (granted, interval_us, final)
    assert bool(found.reason) is not granted


# What webhooks share.


class Hungry:
    """Takes a slot whenever it is woken, until it has had enough."""

    def __init__(self, slots: RequestSlots, wanted: int, tenant: str = "") -> None:
        self.slots, self.wanted, self.tenant, self.taken = slots, wanted, tenant, 0

    def wake(self) -> None:
        while self.taken < self.wanted and self.slots.take(self):
            self.taken += 1

    def give_back(self) -> None:
        self.taken -= 1
        self.slots.give_back(self)


def test_slots_go_to_those_who_waited_longest_and_none_is_lost() -> None:
    slots = RequestSlots(2)
    first, sated, last = Hungry(slots, 2, "a"), Hungry(slots, 1, "b"), Hungry(slots, 1, "c")
    other = Hungry(slots, 1, "d")
    for each in (first, other, sated, last):
        each.wake()
    assert (first.taken, other.taken, sated.taken, last.taken) == (1, 1, 0, 0)
    assert [slots.is_waiting(one) for one in (first, other, sated, last)] == [True, False, True, True]
    sated.wanted = first.wanted = 0
    first.give_back()  # the one after it wants none any more: the last one gets it
    assert (first.taken, sated.taken, last.taken) == (0, 0, 1)
    assert not any(slots.is_waiting(one) for one in (first, other, sated, last))


def test_a_webhook_alone_has_all_that_it_may_have() -> None:
    slots = RequestSlots()
    alone = Hungry(slots, WEBHOOK_CONCURRENCY_MAX)
    alone.wake()
    assert alone.taken == WEBHOOK_CONCURRENCY_MAX


def test_webhooks_that_hang_leave_slots_for_those_that_hold_none() -> None:
    slots = RequestSlots()
    quarter = PUSH_REQUESTS_MAX // 4
    hanging = [Hungry(slots, 64, "a") for _ in range(8)]
    for each in hanging:
        each.wake()
    newcomers = [Hungry(slots, 4, "a") for _ in range(quarter // 2)] + [Hungry(slots, 4, "b") for _ in range(20)]
    for each in newcomers:
        each.wake()
    assert min(one.taken for one in hanging + newcomers) >= 1
    hanging = [Hungry(slots, 64, f"h{number % 50}") for number in range(1000)]
    for each in hanging:
        each.wake()
    tenants = [Hungry(slots, 4, f"t{number}") for number in range(quarter - 50)]
    for each in tenants:
        each.wake()
    assert min(one.taken for one in tenants) == 1


SLOT_STEPS = st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["take", "give back"])), max_size=300)


@given(SLOT_STEPS, st.integers(4, 40))
def test_slots_follow_their_rules_whatever_happens(steps: list[tuple[int, str]], count: int) -> None:
    slots = RequestSlots(count)
    workers = [Hungry(slots, 0, f"t{number % 4}") for number in range(12)]

    def of_tenant(tenant: str) -> int:
        return sum(one.taken for one in workers if one.tenant == tenant)

    for number, step in steps:
        worker = workers[number]
        free = count - sum(one.taken for one in workers)
        if step == "give back" and worker.taken:
            worker.give_back()
        elif step == "take":
            before = worker.taken, of_tenant(worker.tenant)
            worker.wanted = worker.taken + 1
            worker.wake()
            if before[1] == 0:
                assert (worker.taken == 1) is (free > 0)
            elif worker.taken > before[0]:
                assert free > count // 4
                assert before[0] == 0 or free > count // 2
                assert of_tenant(worker.tenant) <= count // 2
        free = count - sum(one.taken for one in workers)
        assert free >= 0
        for one in workers:
            assert not slots.is_waiting(one) or one.taken < one.wanted
            assert not slots.is_waiting(one) or not free or of_tenant(one.tenant)  # else it would have been woken


class Counting:
    tenant = "a"

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def test_memory_is_full_until_half_is_settled() -> None:
    memory, worker = LeasedMemory(100), Counting()
    memory.workers.add(worker)
    memory.add("a", 50)
    memory.add("b", 50)
    assert not memory.is_full("a")
    memory.add("c", 1)
    assert memory.is_full("a")
    memory.add("b", -40)
    assert memory.is_full("a")
    memory.add("b", -10)
    memory.add("a", -1)
    assert not memory.is_full("a")
    assert worker.woken == 2


def test_a_tenant_has_half_of_the_memory() -> None:
    memory, worker = LeasedMemory(100), Counting()
    memory.workers.add(worker)
    memory.add("a", 51)
    assert memory.is_full("a")
    assert not memory.is_full("b")
    memory.add("a", -25)
    assert memory.is_full("a")
    memory.add("a", -1)
    assert not memory.is_full("a")
    assert worker.woken == 2


def test_the_log_is_a_ring_and_tests_do_not_count() -> None:
    log = DeliveryLog()
    for number in range(60):
        log.add(WebhookDelivery(number, str(number), offset=number, messages=2, error="no" if number % 2 else ""))
    log.add(WebhookDelivery(60, "ping", error="refused"))
    assert (log.delivered, log.failed, log.last_error) == (60, 60, "no")
    assert [entry.id for entry in log.newest()[:2]] == ["ping", "59"]
    assert len(log.newest()) == 50
