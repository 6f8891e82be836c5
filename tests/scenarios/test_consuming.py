"""Stories of consumers: brokers that go away, members that come and go, workers that are stopped."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.broker_process import BrokerProcess
from tests.faults.fork_server import Nursery

import headrace
from headrace import errors

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("brokers")) as forking:
        yield forking


@pytest.fixture
def broker(nursery: Nursery, tmp_path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(nursery, tmp_path / "data", "--log-level", "warning")
    process.start()
    yield process
    process.kill()


@pytest.fixture
def bus(broker: BrokerProcess) -> Iterator[headrace.Bus]:
    with broker.connect() as connected:
        yield connected


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def numbers(start: int, stop: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, stop)]


@pytest.mark.parametrize("end", [BrokerProcess.kill, BrokerProcess.stop])
def test_an_index_reader_does_not_notice_that_the_broker_was_restarted(
    broker: BrokerProcess, bus: headrace.Bus, end: Callable[[BrokerProcess], None]
) -> None:
    bus.publish_many("t", numbers(0, 100))
    seen: list[bytes] = []
    with bus.subscribe("t", timeout=PATIENCE_S) as subscription:
        for message in subscription:
            seen.append(message.value)
            if len(seen) in (50, 150):
                end(broker)
                broker.start()
            if len(seen) % 100 == 99 and len(seen) < 200:
                bus.publish_many("t", numbers(len(seen) + 1, len(seen) + 101))
            if len(seen) == 300:
                break
    assert seen == numbers(0, 300)


def test_nothing_sent_while_the_broker_dies_is_lost_or_doubled(broker: BrokerProcess, bus: headrace.Bus) -> None:
    bus.create_topic("t", partitions=2)
    with bus.producer("t", linger=0.001, batch_count=10) as producer:
        for round_number in range(4):
            for number in range(1000):
                producer.send(b"%d-%d" % (round_number, number), key=f"k{number % 20}")
            broker.kill()
            broker.start()
    with bus.subscribe("t", timeout=1) as subscription:
        seen = [message.value for message in subscription]
    assert sorted(seen) == sorted(b"%d-%d" % (part, number) for part in range(4) for number in range(1000))


def test_keys_stay_in_order_through_a_crash(broker: BrokerProcess, bus: headrace.Bus) -> None:
    with bus.producer("t", linger=0, batch_count=5) as producer:
        for number in range(3000):
            producer.send(b"%d" % number)
            if number == 1500:
                broker.kill()
                broker.start()
    with bus.subscribe("t", timeout=1) as subscription:
        assert [message.value for message in subscription] == numbers(0, 3000)


def test_a_group_goes_on_after_a_restart_without_missing_anything(broker: BrokerProcess, bus: headrace.Bus) -> None:
    bus.create_topic("t", partitions=3)
    bus.publish_many("t", numbers(0, 300), keys=[b"%d" % (number % 30) for number in range(300)])
    seen: set[bytes] = set()
    kills = [100, 200]
    with bus.subscribe("t", group="g", commit_interval=0.05, timeout=PATIENCE_S) as subscription:
        for message in subscription:
            seen.add(message.value)
            if kills and len(seen) == kills[0]:
                del kills[0]
                broker.kill()
                broker.start()
            if len(seen) == 300:
                break
    assert seen == {*numbers(0, 300)}
    eventually(lambda: sum(place.lag for place in bus.describe_group("g").places) == 0)


def test_members_share_what_there_is_and_take_over_from_one_that_leaves(bus: headrace.Bus) -> None:
    bus.create_topic("t", partitions=4)
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    members = {name: bus.subscribe("t", group="g", commit_interval=0.05) for name in ("one", "two")}

    def consume(name: str) -> None:
        with members[name] as member:
            for message in member:
                seen[name].append((message.partition, message.offset))

    threads = [threading.Thread(target=consume, args=(name,)) for name in members]
    for thread in threads:
        thread.start()
    eventually(lambda: all(len(member.assigned) == 2 for member in members.values()))
    for partition in range(4):
        bus.publish_many("t", numbers(0, 50), partition=partition)
    eventually(lambda: sum(map(len, seen.values())) >= 200)
    members["one"].stop()
    threads[0].join(PATIENCE_S)
    eventually(lambda: len(members["two"].assigned) == 4)
    for partition in range(4):
        bus.publish_many("t", numbers(50, 60), partition=partition)
    eventually(lambda: sum(map(len, seen.values())) >= 240)
    members["two"].stop()
    threads[1].join(PATIENCE_S)
    everything = [place for places in seen.values() for place in places]
    assert sorted(everything) == sorted((partition, offset) for partition in range(4) for offset in range(60))


def test_a_partition_moves_only_when_its_message_is_finished(bus: headrace.Bus) -> None:
    bus.create_topic("t", partitions=2)
    for partition in range(2):
        bus.publish_many("t", numbers(0, 3), partition=partition)
    with bus.subscribe("t", group="g", timeout=1) as first:
        messages = iter(first)
        held = next(messages)
        newcomer = bus.subscribe("t", group="g", timeout=3)
        with newcomer:
            # Both partitions are with the first one. One is let go at once unless the message at work is of it.
            eventually(lambda: len(first.assigned) == 1)
            mine = held.partition in [partition for _, partition in first.assigned]
            theirs = [(held.partition, held.offset)] if not mine else []
            rest = [(message.partition, message.offset) for message in messages]
            came = [(message.partition, message.offset) for message in newcomer]
    everything = sorted([(held.partition, held.offset), *rest, *came])
    assert everything == [(partition, offset) for partition in range(2) for offset in range(3)], theirs


def test_a_partition_is_handed_over_in_the_middle_of_a_batch(bus: headrace.Bus) -> None:
    bus.create_topic("t", partitions=2)
    for partition in range(2):
        bus.publish_many("t", numbers(0, 1000), partition=partition)
    seen: list[tuple[str, int, int]] = []
    members = {name: bus.subscribe("t", group="g") for name in ("old", "new")}

    def consume(name: str) -> None:
        with members[name] as member:
            for message in member:
                seen.append((name, message.partition, message.offset))
                time.sleep(0.0005)

    threads = [threading.Thread(target=consume, args=(name,)) for name in members]
    threads[0].start()
    eventually(lambda: len(seen) > 100)
    threads[1].start()
    eventually(lambda: len(seen) >= 2000)
    for member, thread in zip(members.values(), threads, strict=True):
        member.stop()
        thread.join(PATIENCE_S)
    assert sorted((partition, offset) for _, partition, offset in seen) == [
        (partition, offset) for partition in range(2) for offset in range(1000)
    ]
    assert {name for name, _, _ in seen} == {"old", "new"}


def test_a_member_that_was_out_of_touch_comes_back(broker: BrokerProcess, bus: headrace.Bus) -> None:
    bus.create_topic("t", partitions=2)
    for partition in range(2):
        bus.publish_many("t", numbers(0, 20), partition=partition)
    seen: dict[str, set[tuple[int, int]]] = {"sleepy": set(), "steady": set()}
    done = threading.Event()

    async def sleepy() -> None:
        sleepy_bus = await headrace.connect_async(broker.tcp_url)
        async with sleepy_bus, sleepy_bus.subscribe("t", group="g", session_timeout=0.5, timeout=0.2) as member:
            while not done.is_set():
                async for message in member:
                    if not seen["sleepy"]:
                        time.sleep(1.5)  # the whole loop stands still, heartbeats included
                    seen["sleepy"].add((message.partition, message.offset))

    thread = threading.Thread(target=lambda: asyncio.run(sleepy()))
    thread.start()
    eventually(lambda: [each.members for each in bus.groups()] == [1])
    with bus.subscribe("t", group="g", session_timeout=0.5, timeout=0.2) as steady:
        eventually(lambda: [each.members for each in bus.groups()] == [1] and len(steady.assigned) == 2)
        eventually(lambda: [each.members for each in bus.groups()] == [2])
        for number in range(20, 40):
            for partition in range(2):
                bus.publish("t", b"%d" % number, partition=partition)
        everything = {(partition, offset) for partition in range(2) for offset in range(40)}

        def all_seen() -> bool:
            seen["steady"].update((message.partition, message.offset) for message in steady)
            return seen["steady"] | seen["sleepy"] == everything

        eventually(all_seen)
    done.set()
    thread.join(PATIENCE_S)
    assert any(offset >= 20 for _, offset in seen["sleepy"])


def test_stop_finishes_the_message_at_work_and_commits_it(bus: headrace.Bus) -> None:
    bus.publish_many("t", numbers(0, 1000))
    subscription = bus.subscribe("t", group="g")
    handled: list[int] = []

    def handle(message: headrace.Received) -> None:
        time.sleep(0.001)
        handled.append(message.offset)

    runner = threading.Thread(target=subscription.run, args=(handle,), kwargs={"workers": 2})
    runner.start()
    eventually(lambda: len(handled) > 10)
    subscription.stop()
    runner.join(PATIENCE_S)
    assert not runner.is_alive()
    assert handled == list(range(len(handled)))
    assert len(handled) < 1000
    assert [place.offset for place in bus.describe_group("g").places] == [len(handled)]


def test_sigterm_lets_a_worker_process_end_in_peace(broker: BrokerProcess, bus: headrace.Bus) -> None:
    bus.publish_many("t", numbers(0, 100_000))
    program = f"""
        import headrace
        bus = headrace.connect({broker.tcp_url!r})
        handled = []
        def handle(message):
            handled.append(message.offset)
            if len(handled) == 10:
                print("at work", flush=True)
        bus.subscribe("t", group="g").run(handle, stop_on_signals=True)
        bus.close()
        print(handled[-1] + 1)
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "at work\n"
    worker.send_signal(signal.SIGTERM)
    said, _ = worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode == 0
    assert [place.offset for place in bus.describe_group("g").places] == [int(said)]


WORKERS = {
    "app": "app = headrace.App({url!r}); app.on('t')(handle); app.run()",
    "subscription": "headrace.connect({url!r}).subscribe('t', group='g').run(handle, workers=2, stop_on_signals=True)",
}


@pytest.mark.parametrize("worker", WORKERS)
def test_a_signal_that_another_thread_takes_ends_a_worker_too(
    broker: BrokerProcess, bus: headrace.Bus, worker: str
) -> None:
    """The kernel may give it to a thread that is just starting another one, and nothing wakes the main thread then."""
    bus.publish("t", b"")
    program = f"""
import headrace, signal, threading
def handle(message):
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
{WORKERS[worker].format(url=broker.tcp_url)}
"""
    subprocess.run([sys.executable, "-c", program], env=os.environ, timeout=PATIENCE_S, check=True)


STUCK_WORKERS = {
    "app": "app = headrace.App({url!r}); app.on('t')(handle); app.run()",
    "app with a coroutine": "app = headrace.App({url!r}); app.on('t')(wait); app.run()",
    "asyncio app": "app = headrace.AsyncApp({url!r}); app.on('t')(handle); asyncio.run(app.run())",
    "asyncio app with a coroutine": "app = headrace.AsyncApp({url!r}); app.on('t')(wait); asyncio.run(app.run())",
    "asyncio app whose loop is blocked": "app = headrace.AsyncApp({url!r}); app.on('t')(block); asyncio.run(app.run())",
    "subscription": "headrace.connect({url!r}).subscribe('t', group='g').run(handle, stop_on_signals=True)",
    "subscription with threads": (
        "headrace.connect({url!r}).subscribe('t', group='g').run(handle, workers=2, stop_on_signals=True)"
    ),
}


@pytest.mark.parametrize(
    ("worker", "number"), list(zip(STUCK_WORKERS, itertools.cycle([signal.SIGTERM, signal.SIGINT]), strict=False))
)
def test_a_second_signal_ends_a_stuck_worker(
    broker: BrokerProcess, bus: headrace.Bus, worker: str, number: signal.Signals
) -> None:
    bus.publish("t", b"")
    bus.create_subscription("t", lease_seconds=1)
    program = f"""
import asyncio, headrace, sys, time
def handle(message):
    print("at work", flush=True)
    while True:
        time.sleep(1000)
async def wait(message):
    print("at work", flush=True)
    await asyncio.Event().wait()
async def block(message):
    handle(message)
{STUCK_WORKERS[worker].format(url=broker.tcp_url)}
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "at work\n"
            process.send_signal(number)
            said = process.stderr.readline()
            assert said.startswith(f"draining; signal again to stop at once  signal={number.name}")
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == 128 + number
        finally:
            process.kill()
    if "app" in worker:
        with bus.lease("t", wait=PATIENCE_S) as jobs:  # when the lease has expired
            assert [job.deliveries for job in jobs] == [2]


def test_a_topic_that_is_made_anew_is_read_from_its_beginning(
    bus: headrace.Bus, caplog: pytest.LogCaptureFixture
) -> None:
    bus.publish_many("t", numbers(0, 10))
    with bus.subscribe("t", timeout=5) as subscription:
        for message in subscription:
            if message.value == b"9":
                break
        bus.delete_topic("t")
        with pytest.raises(errors.TopicNotFound):
            next(iter(subscription))
    assert not caplog.records


def test_a_broker_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(errors.ConnectionFailed, match=rf"127.0.0.1:{port}.*headrace serve"):
        headrace.connect(f"headrace://127.0.0.1:{port}")
    with pytest.raises(errors.ConnectionFailed, match="headrace serve"):
        headrace.connect(f"headrace+unix://{tmp_path}/nothing")
    with pytest.raises(errors.InvalidArgument, match=r"headrace://127\.0\.0\.1:7390"):
        headrace.connect("localhost:7390")
