"""A process that forks while it has a log open, and ends with an error if that hurts: forked.py ROLE DIRECTORY."""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import headrace
from headrace.model.errors import CursorInUse, LogInUse

CHILD_S = 10
"""A child that takes longer hangs."""


def in_child(action: Callable[[], object]) -> int:
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
    os._exit(0)


def check(child: int) -> None:
    status = os.waitpid(child, 0)[1]
    assert status != signal.SIGALRM, "the child hangs"
    assert status == 0, f"the child ended with {status}"


def refused(action: Callable[[], object]) -> None:
    """The action fails, with a text that says why."""
    try:
        action()
    except (LogInUse, CursorInUse) as error:
        text = str(error)
    else:
        raise AssertionError(f"{action} was done in a forked child")
    assert "fork" in text, text


def touch(path: str) -> None:
    """A child that uses the log of its parent is refused, whatever it does, and harms nothing."""
    log = headrace.Log(path, sync_every=0.01)
    actions: list[Callable[[], object]] = [
        lambda: log.append(b"child"),
        lambda: log.append(b"child", key=b"k"),
        lambda: log.append_many([b"child"]),
        log.flush,
        lambda: log.truncate_before(1),
        lambda: log.compact(lambda _: False),
    ]
    for number in range(60):
        log.append(b"%d" % number)  # now something waits in the buffer, of which the child has a copy
        if number % 5 == 0:
            log.flush()
        check(in_child(lambda: refused(actions[number % len(actions)])))  # noqa: B023 it is called at once
        check(in_child(log.close))
    log.close()
    with headrace.Log(path) as log:
        assert [message.value for message in log] == [b"%d" % number for number in range(60)]


def end_normally(path: str) -> None:
    """A child that ends as a program does, with all that runs at exit, writes nothing of its parent's."""
    log = headrace.Log(path, sync_every=None)
    log.append(b"parent")
    child = os.fork()
    if not child:
        sys.exit(0)
    check(child)
    log.close()
    with headrace.Log(path) as log:
        assert [message.value for message in log] == [b"parent"]


def read_and_write_elsewhere(path: str) -> None:
    """A child opens the log anew to read, and another to write."""
    log = headrace.Log(path)
    log.append(b"parent")
    log.flush()

    def read_and_write() -> None:
        with headrace.Log(path, readonly=True) as mine:
            assert mine.read(0).value == b"parent"
        with headrace.Log(f"{path}-child") as other:
            other.append(b"child")
            other.flush()
            assert other.read(0).value == b"child"
        with contextlib.suppress(LogInUse):
            headrace.Log(path)
            raise AssertionError("two writers")

    for _ in range(5):
        check(in_child(read_and_write))
    log.append(b"more")
    log.close()


def fork_while_threads_append(path: str) -> None:
    """Whatever a thread is doing in the moment of the fork, the child is refused and does not hang."""
    log = headrace.Log(path, segment_bytes=64 << 10, sync_every=0.001)
    done = threading.Event()

    def append_all_the_time() -> None:
        while not done.is_set():
            for _ in range(100):
                log.append(b"x")
            log.append_many([b"x"] * 10)
            log.append(b"y", key=b"k")

    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=append_all_the_time) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            time.sleep(0.002)
            check(in_child(lambda: refused(lambda: log.append(b"child"))))
            check(in_child(lambda: refused(log.flush)))
            check(in_child(log.close))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    end = log.next_offset
    log.close()
    with headrace.Log(path) as log:
        assert log.next_offset == end
        assert {message.value for message in log} == {b"x", b"y"}


def close_with_a_child_alive(path: str) -> None:
    """The log is free for the next writer when its parent closes it, though a child lives on."""
    log = headrace.Log(path)
    log.append(b"parent")
    child = in_child(lambda: time.sleep(CHILD_S / 2))
    log.close()
    try:
        with headrace.Log(path) as log:
            log.append(b"again")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert Path(path).exists()


def read_on(path: str) -> None:
    """A child reads on with its parent's reader, while threads of the parent's use it, and closes only its own."""
    log = headrace.Log(path, segment_bytes=4096, sync_every=None)
    log.append_many([b"%d" % number * 50 for number in range(200)])
    log.flush()
    reader = headrace.Log(path, readonly=True)
    done = threading.Event()

    def read_all_the_time() -> None:
        while not done.is_set():
            assert len([*reader]) == 200
            reader.wait(200, timeout=0.001)

    def read() -> None:
        assert [message.value for message in reader] == [b"%d" % number * 50 for number in range(200)]
        assert reader.verify().sound
        assert not reader.wait(200, timeout=0.001)
        reader.close()

    threads = [threading.Thread(target=read_all_the_time) for _ in range(3)]
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            check(in_child(read))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    reader.close()
    log.close()


def hold_cursors(path: str) -> None:
    """A child cannot move its parent's cursor, nor give its lock back, nor consume under its parent's lock."""
    log = headrace.Log(path)
    log.append_many([b"x"] * 20)
    log.flush()
    reader = headrace.Log(path, readonly=True)
    assert reader.consume(2)[-1].offset == 1  # the shared place is open now
    cursor = reader.cursor("mine")

    def use_cursor() -> None:
        refused(lambda: cursor.commit(7))
        cursor.close()
        try:
            headrace.Log(path, readonly=True).cursor("mine")
        except CursorInUse:
            return
        raise AssertionError("the parent's cursor is free")

    def consume_while_held() -> None:
        assert reader.consume(timeout=0.01) == [], "consumed while another held the place"

    def consume() -> None:
        assert [message.offset for message in reader.consume(3)] == [2, 3, 4]

    check(in_child(use_cursor))
    assert cursor.committed == 0
    cursor.commit(3)
    assert reader._shared is not None
    assert reader._shared.lock()  # as in the midst of consuming
    check(in_child(consume_while_held))
    reader._shared.unlock()
    check(in_child(consume))
    assert reader.consume(1)[0].offset == 5
    cursor.close()
    with reader.cursor("mine") as cursor:
        assert cursor.committed == 3
    reader.close()
    log.close()


def drop_in_child(path: str) -> None:
    """A child that drops its parent's log writes nothing, warns of nothing and leaves the parent its lock."""
    import warnings

    logs = [headrace.Log(path, sync_every=None)]
    logs[0].append(b"parent")

    def drop() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            logs.clear()
        with contextlib.suppress(LogInUse):
            headrace.Log(path)
            raise AssertionError("two writers")

    for _ in range(3):
        check(in_child(drop))
    logs[0].close()
    with headrace.Log(path) as log:
        assert [message.value for message in log] == [b"parent"]


def open_broker(path: str) -> None:
    """A child of a program with a broker inside harms nothing, whether it uses the bus, closes it, or ends."""
    bus = headrace.open(path)
    bus.publish("orders", b"parent")
    before = {str(file): file.read_bytes() for file in Path(path).rglob("*.seg")}

    def end() -> None:
        with contextlib.suppress(LogInUse):
            headrace.open(path)
            raise AssertionError("two brokers")

    check(in_child(end))
    child = os.fork()
    if not child:
        sys.exit(0)  # with all that runs at exit
    check(child)
    assert {str(file): file.read_bytes() for file in Path(path).rglob("*.seg")} == before
    assert bus.publish("orders", b"more").offset == 1
    bus.close()
    with headrace.open(path) as again:
        assert again.publish("orders", b"again").offset == 2


if __name__ == "__main__":
    roles = (
        touch,
        end_normally,
        read_and_write_elsewhere,
        fork_while_threads_append,
        close_with_a_child_alive,
        read_on,
        hold_cursors,
        drop_in_child,
        open_broker,
    )
    {role.__name__: role for role in roles}[sys.argv[1]](sys.argv[2])
