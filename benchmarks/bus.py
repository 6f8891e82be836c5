"""The group `bus`: subjects, request/reply and routes, beside others that have the like."""

import itertools
import time
from functools import cache
from random import Random

from benchmarks.broker import forgiven
from benchmarks.broker_nats import Nats, NatsNode
from benchmarks.broker_redis import Redis, RedisNode
from benchmarks.bus_nats import NatsRequests
from benchmarks.bus_redis import RedisRequests
from benchmarks.bus_routes import route_benchmarks
from headrace.bench import brokers
from headrace.bench.broker_workloads import Headrace
from headrace.bench.brokers import RATE
from headrace.bench.measure import Benchmark, Sample, Subject, check, each_us, percentile
from headrace.bench.payload import Payload
from headrace.bench.request_workloads import HeadraceRequests, asking, paced_params
from headrace.broker.subject_trie import SubjectTrie

SUBSCRIPTIONS = 100_000
_REQUESTS_S = 1.0
_SUBJECTS = 20_000
"""Different ones that are matched, many more than are remembered."""


def benchmarks(*, seconds: float = _REQUESTS_S, subscriptions: int = SUBSCRIPTIONS) -> list[Benchmark]:
    """All of the group."""
    return [*request_benchmarks(seconds), matching(subscriptions), *route_benchmarks()]


def request_benchmarks(seconds: float) -> list[Benchmark]:
    """Request/reply, and in the same run the publish-to-receive latency that it is compared with."""
    payload, count = Payload(), max(round(RATE * seconds), 1)
    requests = [
        asking(HeadraceRequests(), payload),
        forgiven(asking(NatsRequests(), payload)),
        forgiven(asking(RedisRequests(), payload)),
    ]
    messages = [
        brokers.latency(Headrace(), payload, synced=False),
        forgiven(brokers.latency(Nats(NatsNode()), payload, synced=False)),
        forgiven(brokers.latency(Redis(RedisNode()), payload, synced=False)),
    ]
    asked = {"request_reply_p50_ms": percentile(50, "ms"), "request_reply_p99_ms": percentile(99, "ms")}
    sent = {"publish_receive_p50_ms": percentile(50, "ms"), "publish_receive_p99_ms": percentile(99, "ms")}
    params = paced_params(payload)
    return [Benchmark(asked, requests, params, count), Benchmark(sent, messages, params, count)]


def matching(subscriptions: int) -> Benchmark:
    """One subject against many subscriptions, without a look at what was found before."""

    @cache
    def filled() -> SubjectTrie[int]:
        trie: SubjectTrie[int] = SubjectTrie()
        for number in range(subscriptions):
            trie.add(pattern_of(number), number)
        return trie

    def sample(_: str, count: int) -> Sample:
        trie, dice = filled(), Random(count)
        devices = [dice.randrange(subscriptions) for _ in range(_SUBJECTS)]
        subjects = [subject_of(device) for device in devices]
        found = 0
        begin = time.perf_counter()
        for subject in itertools.islice(itertools.cycle(subjects), count):
            found += len(trie.find(subject))
        seconds = time.perf_counter() - begin
        for device, subject in zip(devices[:100], subjects, strict=False):
            check(device in trie.find(subject), f"{subject} does not find its own subscription")
        check(found >= count, f"{count} subjects found {found} subscriptions")
        return Sample(seconds)

    params = {
        "subscriptions": subscriptions,
        "patterns": "devices.SITE.DEVICE.state, devices.*.DEVICE.#, devices.SITE.DEVICE.> and #.DEVICE.state",
        "subjects": f"{_SUBJECTS} different ones of 4 tokens, not from the cache",
    }
    subject = Subject("headrace", sample, {}, 1)
    return Benchmark({"switchboard_match_us": each_us()}, [subject], params)


def pattern_of(number: int) -> str:
    """The pattern of a subscription, which matches the subject of its own device."""
    site, device = f"site{number % 300}", f"device{number}"
    return (
        f"devices.{site}.{device}.state",
        f"devices.*.{device}.#",
        f"devices.{site}.{device}.>",
        f"#.{device}.state",
    )[number % 4]


def subject_of(number: int) -> str:
    """What a device publishes to."""
    return f"devices.site{number % 300}.device{number}.state"
