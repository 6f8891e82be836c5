"""Sample data for the ready pipelines: the same for the same seed, with what real data has wrong with it.

    python pipelines/samples.py logs --rate 1000 --count 100000

Some messages come late, some far too late, some twice, and some cannot be read.
"""

import argparse
import heapq
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, NamedTuple

import headrace

Body = dict[str, Any]
Times = Iterator[datetime]


class Message(NamedTuple):
    """What is published: its key, its value, and when what it tells of happened."""

    key: str
    value: bytes
    at: datetime


@dataclass(frozen=True)
class Faults:
    """How often something is wrong, as shares of the messages, and how wrong it is."""

    late: float = 0.05
    late_s: float = 20.0
    """At most so much out of order: watermarks are to put up with it."""
    lost: float = 0.002
    """So late that windows are closed by then."""
    lost_s: tuple[float, float] = (1800.0, 3600.0)
    twice: float = 0.01
    broken: float = 0.002


NO_FAULTS = Faults(late=0.0, lost=0.0, twice=0.0, broken=0.0)


def messages(
    kind: str, *, seed: int = 1, start: datetime, spacing_s: float, faults: Faults | None = None
) -> Iterator[Message]:
    """Messages without end, in the order in which they arrive.

    Parameters:
        kind: one of KINDS.
        seed: the same seed, start and spacing give the same messages.
        start: when the first thing happens.
        spacing_s: how many seconds lie between two things that happen.
        faults: what goes wrong on the way; by default a bit of everything.
    """
    times = (start + timedelta(seconds=spacing_s * number) for number in itertools.count())
    made = KINDS[kind](Random(f"{kind}/{seed}"), times)
    return disturbed(Random(f"faults/{kind}/{seed}"), made, faults or Faults())


def disturbed(rng: Random, made: Iterator[tuple[str, Body]], faults: Faults) -> Iterator[Message]:
    """The same on a bad network: late, twice, broken."""
    waiting: list[tuple[float, int, Message]] = []
    numbers = itertools.count()
    for key, body in made:
        at = datetime.fromisoformat(body["ts"])
        now = at.timestamp()
        message = Message(key, json.dumps(body).encode(), at)
        if rng.random() < faults.broken:
            message = message._replace(value=_broken(rng, body))
        heapq.heappush(waiting, (now + _delay_s(rng, faults), next(numbers), message))
        if rng.random() < faults.twice:
            heapq.heappush(waiting, (now + rng.uniform(0.0, faults.late_s), next(numbers), message))
        while waiting and waiting[0][0] <= now:
            yield heapq.heappop(waiting)[2]
    while waiting:
        yield heapq.heappop(waiting)[2]


def _delay_s(rng: Random, faults: Faults) -> float:
    draw = rng.random()
    if draw < faults.lost:
        return rng.uniform(*faults.lost_s)
    return rng.uniform(0.0, faults.late_s) if draw < faults.lost + faults.late else 0.0


def _broken(rng: Random, body: Body) -> bytes:
    text = json.dumps(body).encode()
    return rng.choice(
        (
            text[: len(text) // 2],
            b"\xff\xfe is no text",
            json.dumps({**body, "ts": "yesterday"}).encode(),
            json.dumps({name: value for name, value in body.items() if name != "ts"}).encode(),
        )
    )


def _iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds")


def logs(rng: Random, times: Times) -> Iterator[tuple[str, Body]]:
    """Lines of services; now and then one of them has a bad few minutes."""
    services = ("checkout", "search", "login", "billing")
    bad_until = dict.fromkeys(services, datetime.min.replace(tzinfo=UTC))
    for at in times:
        service = rng.choice(services)
        if rng.random() < 0.0005:
            bad_until[service] = at + timedelta(seconds=rng.uniform(60.0, 180.0))
        errors = 30.0 if at < bad_until[service] else 1.0
        level = rng.choices(("DEBUG", "INFO", "WARN", "ERROR"), (20.0, 70.0, 9.0, errors))[0]
        message = "timed out: payments" if level == "ERROR" else f"request {rng.randrange(10**6)} served"
        host = f"{service}-{rng.randrange(3)}"
        yield service, {"ts": _iso(at), "service": service, "level": level, "message": message, "host": host}


def clicks(rng: Random, times: Times) -> Iterator[tuple[str, Body]]:
    """People on a site: they come, look at some pages, buy or not, and come again another time."""
    pages = ("/", "/search", "/shoes", "/bags", "/sale", "/about")
    visitors: list[str] = []
    for number, at in enumerate(times):
        if not visitors or rng.random() < 0.12:
            visitors.append(f"user-{rng.randrange(200):03}")
        user = rng.choice(visitors)
        kind = rng.choices(("view", "purchase"), (95.0, 5.0))[0]
        page = "/thanks" if kind == "purchase" else rng.choice(pages)
        if rng.random() < 0.12:
            visitors.remove(user)
        body = {"id": f"c{number}", "ts": _iso(at), "user": user, "kind": kind, "page": page}
        yield user, body | ({"amount": rng.randrange(500, 20_000) / 100} if kind == "purchase" else {})


def traces(rng: Random, times: Times) -> Iterator[tuple[str, Body]]:
    """Requests with how long they took: most are quick, a few are not."""
    endpoints = {"GET /cart": 3.2, "POST /orders": 4.4, "GET /search": 4.0, "GET /health": 0.7}
    for number, at in enumerate(times):
        endpoint = rng.choice(list(endpoints))
        took = rng.lognormvariate(endpoints[endpoint], 0.6)
        if rng.random() < 0.005:
            took *= 40.0
        status = rng.choices((200, 404, 500), (97.0, 2.0, 1.0))[0]
        body = {"trace_id": f"{number:016x}", "service": "shop", "endpoint": endpoint, "status": status}
        yield endpoint, {"ts": _iso(at), **body, "duration_ms": round(took, 3)}


def customers(rng: Random, times: Times) -> Iterator[tuple[str, Body]]:
    """A table as messages: the customers and their segments; later messages replace earlier ones."""
    for number, at in enumerate(itertools.islice(times, 300)):
        customer = f"customer-{number % 200:03}"
        segment = rng.choice(("consumer", "business", "reseller"))
        yield customer, {"ts": _iso(at), "customer": customer, "segment": segment}


def orders(rng: Random, times: Times) -> Iterator[tuple[str, Body]]:
    """Orders of a shop; a few are of customers whom the table does not have yet."""
    for number, at in enumerate(times):
        customer = f"customer-{rng.randrange(210):03}"
        amount = round(rng.lognormvariate(3.5, 0.8), 2)
        channel = rng.choice(("web", "app", "store"))
        body = {"order_id": f"o{number}", "customer": customer, "amount": amount, "channel": channel}
        yield customer, {"ts": _iso(at), **body}


def trades(rng: Random, times: Times) -> Iterator[tuple[str, Body]]:
    """Trades at an exchange: prices wander; now and then one jumps, many trade, nobody does, or somebody cheats."""
    prices = {"ACME": 100.0, "GLOBEX": 40.0, "INITECH": 12.0, "UMBRELLA": 250.0}
    loud_until = dict.fromkeys(prices, datetime.min.replace(tzinfo=UTC))
    silent_until = dict(loud_until)
    planned: deque[Body] = deque()
    for number, at in enumerate(times):
        instrument = rng.choice([name for name in prices if at >= silent_until[name]] or list(prices))
        prices[instrument] *= 1.0 + rng.gauss(0.0, 0.0005)
        draw = rng.random()
        if draw < 0.001:
            prices[instrument] *= rng.choice((0.9, 1.1))
        elif draw < 0.002:
            loud_until[instrument] = at + timedelta(seconds=8)
        elif draw < 0.003:
            silent_until[instrument] = at + timedelta(seconds=rng.uniform(90.0, 150.0))
        quantity = rng.randrange(1, 50) * (100 if at < loud_until[instrument] else 1)
        body: Body = {"instrument": instrument, "account": f"account-{rng.randrange(40):02}", "quantity": quantity}
        body |= {"side": rng.choice(("buy", "sell")), "price": round(prices[instrument], 4)}
        if planned and rng.random() < 0.2:
            body = planned.popleft()
        elif rng.random() < 0.002:
            planned.append({**body, "side": "sell" if body["side"] == "buy" else "buy"})
        yield body["instrument"], {"ts": _iso(at), "trade_id": f"t{number}", **body}


def order_events(rng: Random, times: Times) -> Iterator[tuple[str, Body]]:
    """What happens to orders, each event with the version of its order that it makes."""
    going_on: dict[str, list[Body]] = {}
    for number, at in enumerate(times):
        if not going_on or rng.random() < 0.35:
            order = f"order-{number}"
            going_on[order] = _life(rng)
        else:
            order = rng.choice(list(going_on)[-50:])
        event = going_on[order].pop(0)
        if not going_on[order]:
            del going_on[order]
        yield order, {"ts": _iso(at), "order_id": order, **event}


def _life(rng: Random) -> list[Body]:
    placed = {"customer": f"customer-{rng.randrange(200):03}", "amount": round(rng.lognormvariate(3.5, 0.8), 2)}
    steps: list[tuple[str, Body]] = [("OrderPlaced", placed)]
    if rng.random() < 0.9:
        steps.append(("OrderPaid", {}))
    if rng.random() < 0.15:
        steps.append(("OrderCancelled", {}))
    elif len(steps) == 2:
        steps.append(("OrderShipped", {"carrier": rng.choice(("post", "bike"))}))
    return [{"version": version, "type": kind, **more} for version, (kind, more) in enumerate(steps, 1)]


KINDS: dict[str, Callable[[Random, Times], Iterator[tuple[str, Body]]]] = {
    "logs": logs,
    "clicks": clicks,
    "traces": traces,
    "customers": customers,
    "orders": orders,
    "trades": trades,
    "order-events": order_events,
}


def publish(bus: headrace.Bus, topic: str, found: Iterator[Message], rate: float) -> int:
    """Publish messages, so many a second; how many there were."""
    begun, published = time.monotonic(), 0
    chunk = max(int(rate / 10), 1)
    while some := list(itertools.islice(found, chunk)):
        keys, values, times = zip(*some, strict=True)
        bus.publish_many(topic, values, keys=keys, timestamps=times)
        published += len(some)
        time.sleep(max(begun + published / rate - time.monotonic(), 0.0))
    return published


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Publish sample data.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--topic", help="where to; by default the kind's name")
    parser.add_argument("--connect", help="the broker's address; by default one on this machine")
    parser.add_argument("--rate", type=float, default=1000.0, help="messages a second")
    parser.add_argument("--count", type=int, default=100_000, help="how many in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster than the clock time goes in the data")
    parser.add_argument("--clean", action="store_true", help="nothing late, twice or broken")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Publish what the command line asks for."""
    given = _arguments(arguments)
    found = messages(
        given.kind,
        seed=given.seed,
        start=datetime.now(UTC),
        spacing_s=given.speed / given.rate,
        faults=NO_FAULTS if given.clean or given.kind == "customers" else None,
    )
    topic = given.topic or given.kind
    with headrace.connect(given.connect) if given.connect else headrace.connect() as bus:
        count = publish(bus, topic, itertools.islice(found, given.count), given.rate)
    sys.stdout.write(f"published {count} messages to {topic}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
