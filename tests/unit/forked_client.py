"""A process that forks while it has a bus, and ends with an error if that hurts: forked_client.py ROLE ADDRESS."""

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import headrace
from headrace.client.connection.endpoints import Endpoints
from headrace.model.errors import Forked

CHILD_S = 60
"""A child that takes longer hangs."""


def in_child(action: Callable[[], object], leave: Callable[[int], object] = os._exit) -> int:
    """Fork, do something in the child, and return its id; its exit status is 0 if that went well."""
    child = os.fork()
    if child:
        return child
    signal.alarm(CHILD_S)
    try:
        action()
    except BaseException:  # noqa: BLE001 nothing may escape into the parent's code
        traceback.print_exc()
        os._exit(1)
    leave(0)
    raise AssertionError("unreachable")


def check(child: int, expected: int = 0) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status != -signal.SIGALRM, "the child hangs"
    assert status == expected, f"the child ended with {status}"


def refused(action: Callable[[], object]) -> None:
    try:
        action()
    except Forked as error:
        text = str(error)
    else:
        raise AssertionError(f"{action} was done in a forked child")
    assert "fork" in text, text


def stored(bus: headrace.Bus, topic: str) -> list[bytes]:
    """All values of a topic."""
    values: list[bytes] = []
    ends = bus.offsets(topic)
    with bus.subscribe(topic, timeout=CHILD_S) as subscription:
        if not any(ends.values()):
            return []
        for message in subscription:
            values.append(message.value)
            if all(subscription.assigned[topic, number] >= end - 1 for number, end in ends.items() if end):
                break
    return values


def publish(address: str) -> None:
    """Parent and children publish in turn, by the bus and by a producer; everything is stored, once."""
    bus = headrace.connect(address)
    producer = bus.producer("forks")
    expected = []

    def both(name: bytes) -> None:
        assert not bus.publish("forks", name + b" bus").duplicate
        assert not producer.publish(name + b" producer").duplicate
        sent = producer.send(name + b" sent")
        producer.flush()
        assert not sent.result().duplicate

    for number in range(5):
        for name in (b"parent %d" % number, b"child %d" % number):
            expected += [name + end for end in (b" bus", b" producer", b" sent")]
        both(b"parent %d" % number)
        check(in_child(lambda: both(b"child %d" % number)))  # noqa: B023 it is called at once
    both(b"last")
    expected += [b"last bus", b"last producer", b"last sent"]
    assert sorted(stored(bus, "forks")) == sorted(expected)
    bus.close()


def pending(address: str) -> None:
    """What the parent has gathered is delivered by the parent, once, however the child ends."""
    bus = headrace.connect(address)
    producer = bus.producer("pending", linger=3600, timeout=3600)
    bus.publish("pending", b"first")
    sent = [producer.send(b"%d" % number) for number in range(10)]

    def leave(status: int) -> None:
        if status == 3:
            raise RuntimeError("as it is meant")
        sys.exit(status)

    def touch() -> None:
        refused(sent[0].result)
        producer.flush()

    for status in (0, 1, 3):
        child = os.fork()
        if not child:
            signal.alarm(CHILD_S)
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 the error is meant
            producer.flush()
            leave(status)
        check(child, min(status, 1))
    check(in_child(touch))
    check(in_child(producer.close))
    check(in_child(bus.close))
    assert not sent[0].done
    producer.flush()
    assert [each.result().duplicate for each in sent] == [False] * 10
    assert stored(bus, "pending") == [b"first", *(b"%d" % number for number in range(10))]
    bus.close()


def while_publishing(address: str) -> None:
    """Whatever other threads do in the moment of the fork, nothing is lost, doubled or waits for ever."""
    bus = headrace.connect(address)
    producer = bus.producer("busy", linger=0.001)
    done = threading.Event()
    counts = [0, 0]

    def send_all_the_time(at: int) -> None:
        while not done.is_set():
            sent = [producer.send(b"%d %d" % (at, counts[at] + more)) for more in range(20)]
            assert not sent[-1].result().duplicate
            assert not bus.publish("busy", b"%d %d" % (at, counts[at] + 20)).duplicate
            counts[at] += 21

    def child(number: int) -> None:
        assert not bus.publish("busy", b"child %d" % number).duplicate
        assert not producer.publish(b"child too %d" % number).duplicate
        bus.close()

    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=send_all_the_time, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(20):
            check(in_child(lambda: child(number)))  # noqa: B023 it is called at once
    finally:
        done.set()
        for thread in threads:
            thread.join()
    expected = [b"%d %d" % (at, number) for at in range(2) for number in range(counts[at])]
    expected += [b"child%s %d" % (too, number) for number in range(20) for too in (b"", b" too")]
    assert sorted(stored(bus, "busy")) == sorted(expected)
    bus.close()


def left_behind(address: str) -> None:
    """What cannot be carried over is refused in the child, and goes on in the parent."""
    bus = headrace.connect(address)
    bus.publish_many("left", [b"%d" % number for number in range(10)])
    queue = bus.queue("left")

    def each(subscription: Any, jobs: Any, transaction: Any) -> None:
        refused(lambda: next(iter(subscription)))
        refused(subscription.commit)
        refused(lambda: subscription.seek("earliest"))
        subscription.close()
        refused(lambda: next(iter(jobs)))
        jobs.stop()
        jobs.close()
        refused(lambda: transaction.publish("left", b"child"))
        refused(transaction.commit)
        transaction.abort()
        with bus.subscribe("left", group="child", timeout=CHILD_S) as mine:
            assert next(iter(mine)).value == b"0"
        with bus.transaction("child") as mine:
            mine.publish("child", b"child")
        bus.close()

    with (
        bus.subscribe("left", group="g", timeout=CHILD_S) as subscription,
        queue.jobs(prefetch=2) as jobs,
        bus.transaction("t") as transaction,
        queue.leased(2) as leased,
    ):
        messages, series = iter(subscription), iter(jobs)
        assert next(messages).value == b"0"
        job = next(series)
        transaction.publish("done", b"parent")
        check(in_child(lambda: each(subscription, jobs, transaction)))
        child = os.fork()
        if not child:
            signal.alarm(CHILD_S)
            sys.exit(0)  # through all the blocks
        check(child)
        assert bus.describe_group("g").members
        assert queue.stats().leased >= 2 + len(leased)
        assert next(messages).value == b"1"
        assert next(series).offset != job.offset
    assert stored(bus, "done") == [b"parent"]
    assert stored(bus, "child") == [b"child"]
    bus.close()


def in_time(address: str) -> None:
    """A child that cannot reach the broker is told so within its time-out."""
    bus = headrace.connect(address, timeout=0.5)
    bus.publish("in-time", b"parent")

    def late() -> None:
        line: Any = bus._broker
        line._endpoints = Endpoints(line._endpoints.target._replace(port=1))
        try:
            bus.publish("in-time", b"child")
        except headrace.errors.ConnectionFailed:
            return
        raise AssertionError("it was published nowhere")

    check(in_child(late))
    bus.publish("in-time", b"parent")
    bus.close()


def unused(address: str) -> None:
    """Subscriptions and series of jobs that were made and not begun can be begun in the child."""
    bus = headrace.connect(address)
    bus.publish_many("unused", [b"0", b"1"])
    subscription, jobs = bus.subscribe("unused", timeout=CHILD_S), bus.queue("unused").jobs(prefetch=1)

    def grandchild() -> None:
        assert next(iter(subscription)).value == b"0"
        assert next(iter(jobs)).value == b"0"
        jobs.close()

    check(in_child(lambda: check(in_child(grandchild))))
    bus.close()


def leased_by_hand(address: str) -> None:
    """A child has leases of its own, and may settle messages of its parent that it names."""
    bus = headrace.connect(address)
    bus.publish_many("leased", [b"0", b"1", b"2"])
    queue = bus.queue("leased")
    first = queue.lease(1)

    def child() -> None:
        queue.ack(queue.lease(1)[0])
        queue.ack(first[0])

    check(in_child(child))
    assert queue.stats().leased == 0
    assert [job.value for job in queue.lease(10)] == [b"2"]
    bus.close()


def prefork(address: str) -> None:
    """Workers that multiprocessing forks use the bus of the module, as those of a preloaded web server do."""
    bus = headrace.connect(address)
    bus.publish("prefork", b"parent")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=bus.publish, args=("prefork", b"worker %d" % at)) for at in range(3)]
    for worker in workers:
        worker.start()
    bus.publish("prefork", b"parent again")
    for worker in workers:
        worker.join(CHILD_S)
        assert worker.exitcode == 0
    assert sorted(stored(bus, "prefork")) == [b"parent", b"parent again", *(b"worker %d" % at for at in range(3))]
    bus.close()


def embedded(address: str) -> None:
    """An embedded broker stays with the parent; a child is told so at once, and ends in peace."""
    del address
    bus = headrace.open(":memory:")
    bus.publish("t", b"parent")

    def child() -> None:
        refused(lambda: bus.publish("t", b"child"))
        refused(lambda: bus.queue("t").lease())
        refused(bus.info)
        bus.close()

    check(in_child(child))
    check(in_child(lambda: None, sys.exit))
    assert not bus.publish("t", b"parent").duplicate
    assert stored(bus, "t") == [b"parent", b"parent"]
    bus.close()


def with_asyncio(address: str) -> None:
    """A bus of an event loop stays with the parent; a child makes one of its own."""

    async def child(bus: headrace.AsyncBus) -> None:
        for action in (bus.info(), bus.publish("loop", b"child"), bus.queue("loop").lease()):
            try:
                await action
            except Forked:
                continue
            raise AssertionError("it was done in a forked child")
        await bus.close()
        async with await headrace.connect_async(address) as mine:
            await mine.publish("loop", b"child")

    async def parent() -> None:
        async with await headrace.connect_async(address) as bus:
            await bus.publish("loop", b"parent")
            check(in_child(lambda: asyncio.run(child(bus))))
            assert not (await bus.publish("loop", b"parent")).duplicate

    asyncio.run(parent())
    with headrace.connect(address) as bus:
        assert stored(bus, "loop") == [b"parent", b"child", b"parent"]


def descriptors(address: str) -> None:
    """A child keeps no connection of its parent open: the broker sees at once that the parent has closed it."""
    watching, bus = headrace.connect(address), headrace.connect(address)
    with bus.subscribe("open", group="open", create=True):
        before = watching.info().connections
        read, write = os.pipe()
        child = in_child(lambda: os.read(read, 1))
        bus.close()
        while watching.info().connections > before - 2:
            pass
        os.write(write, b"!")
        check(child)
    watching.close()


def named(address: str) -> None:
    """A child has a name of its own, unless it was given one, and everything can be shown there."""
    given, bus = headrace.connect(address, name="given"), headrace.connect(address)
    bus.publish("named", b"x")
    reading, jobs, transaction = bus.subscribe("named", group="named"), bus.queue("named").jobs(), bus.transaction("n")
    reading.begin()
    transaction.begin()
    things = [given, bus, reading, jobs, transaction, bus.producer("named"), bus.queue("named"), headrace.App(bus)]
    before = bus.name

    def look() -> None:
        assert str(os.getpid()) in bus.name
        assert bus.name != before
        assert given.name == "given"
        for thing in things:
            assert "unfinished" not in repr(thing)
        assert "forked" in repr(reading)
        assert "forked" in repr(transaction)
        bus.publish("named", b"y")
        with bus.subscribe("named", group="child"):
            assert bus.name in bus.describe_group("child").members.values()

    check(in_child(look))
    assert bus.name == before
    transaction.abort()
    for closing in (reading, bus, given):
        closing.close()


def live(address: str) -> None:
    """A live subscription stays the parent's; a child asks and subscribes for itself."""
    with headrace.connect(address) as bus, bus.subjects.subscribe("live", timeout=CHILD_S) as mine:
        unused_yet = bus.subjects.subscribe("live.child", timeout=CHILD_S)

        def go_on() -> None:
            refused(lambda: next(iter(mine)))
            mine.close()
            with unused_yet:
                assert bus.subjects.publish("live.child", b"own").receivers == 1
                assert next(iter(unused_yet)).value == b"own"
            try:
                bus.request("nobody")
            except headrace.errors.NoResponders:
                pass
            else:
                raise AssertionError("somebody serves it")
            assert bus.subjects.publish("live", b"from the child").receivers == 1

        check(in_child(go_on))
        assert next(iter(mine)).value == b"from the child"


ROLES = (
    publish,
    pending,
    while_publishing,
    left_behind,
    in_time,
    unused,
    leased_by_hand,
    prefork,
    embedded,
    with_asyncio,
    descriptors,
    named,
    live,
)

if __name__ == "__main__":
    {role.__name__: role for role in ROLES}[sys.argv[1]](sys.argv[2])
