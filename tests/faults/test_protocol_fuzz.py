"""Hostile bytes over real sockets against a real server: it stays alive, answers good clients, and keeps its memory."""

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.faults.hostile_batches import hostile_batch
from tests.known import ENVIRONMENT
from tests.native_client import NativeClient

from headrace.client.leasing.jobs import holdings_of, leased_jobs
from headrace.model.batch import Columns, Producer, encode, parse
from headrace.model.codec import Codec
from headrace.model.error_object import ErrorObject
from headrace.model.errors import HeadraceError
from headrace.model.leasing import Ack, Lease, SubscriptionCreate
from headrace.model.reading import Fetch, StreamClose, StreamCredit, StreamOpen
from headrace.model.request import Answer, Request
from headrace.model.requests import (
    Commit,
    GroupJoin,
    GroupLeave,
    GroupSeek,
    Info,
    Offsets,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDescribe,
    TopicList,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.model.subject_requests import (
    ReplySend,
    RequestSend,
    ServeClose,
    ServeOpen,
    SubjectPublish,
    SubjectSubscribe,
    SubjectUnsubscribe,
    SwitchboardDescribe,
)
from headrace.wire.frames import Frames, frame
from headrace.wire.native import REQUESTS, Hello, Kind, Ping

SOON_S = 60.0
ROUNDS = int(os.environ.get("HEADRACE_FUZZ_ROUNDS", "150"))
MEMORY_BYTES = 160 << 20
"""What hostile clients may make a server take in addition."""
TOPIC = "good"
_KINDS = {head: kind for kind, head in REQUESTS.items()}


class Fortress:
    """A server under attack."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        assert process.stdout is not None
        self.port = json.loads(process.stdout.readline())["port"]
        with self.good() as client:
            client.ask(TopicCreate(TOPIC))
            client.ask(Publish(TOPIC, 0), batch(100, b"first" * 20))
        self._before_bytes = self.memory_bytes()

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.settimeout(SOON_S)
        return sock

    def good(self) -> NativeClient:
        """A client that does nothing wrong."""
        client = NativeClient(self.connect(), SOON_S)
        client.hello()
        return client

    def memory_bytes(self) -> int:
        """The memory of its own: without files that it has mapped."""
        found = re.search(r"RssAnon:\s*(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text())
        assert found
        return int(found[1]) * 1024

    def check(self) -> None:
        """It lives, serves a good client, and has not grown much."""
        assert self._process.poll() is None, "the server died"
        with self.good() as client:
            offset = client.ask(Publish(TOPIC, 0), batch(1)).base_offset
            _, body = client.ask_for_batches(Fetch(TOPIC, 0, offset))
            assert body
        grown = self.memory_bytes() - self._before_bytes
        assert grown < MEMORY_BYTES, f"the server took {grown >> 20} MiB more"


@pytest.fixture(scope="module")
def fortress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    """A server for all attacks, which must end in peace after them."""
    directory = tmp_path_factory.mktemp("fortress")
    command = [sys.executable, "-m", "headrace", "serve", "--data", str(directory / "data"), "--port", "0", "--json"]
    command += ["--heartbeat-ms", "1000", "--auto-create-topics", "no", "--receive-bytes-max", "32MiB"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=ENVIRONMENT)
    with process:
        watchdog = threading.Timer(280, process.kill)
        watchdog.start()
        try:
            yield Fortress(process)
            process.terminate()
            assert process.wait(SOON_S) == 0
        finally:
            watchdog.cancel()
            process.kill()
    said = (directory / "log").read_text(encoding="utf-8")
    assert "Traceback" not in said, said[-5000:]


def batch(count: int, value: bytes = b"x", producer: int = 0) -> bytes:
    columns = Columns([value] * count, keys=[b"k"] * count)
    return bytes(encode(columns, 1_700_000_000_000_000, producer=Producer(producer, 0, 0)).data)


def request(head: Request[Any], correlation: int = 1, body: bytes = b"") -> bytes:
    return bytes(frame(_KINDS[type(head)], correlation, head, len(body))) + body


HELLO = request(Hello(client="hostile"))


def valid(dice: Random) -> bytes:
    """Some request as a good client would send it."""
    place = PartitionOffset(TOPIC, 0, dice.randrange(3), dice.randrange(3))
    heads: list[tuple[Answer, bytes]] = [
        (Publish(TOPIC, 0, durability=dice.randrange(3)), batch(dice.randrange(1, 20))),
        (Publish(TOPIC, 0), batch(3, producer=dice.randrange(16, 1000))),
        (Fetch(TOPIC, 0, 0, bytes_max=dice.choice([0, 1, 5000, -1, 1 << 40]), wait_ms=dice.randrange(50)), b""),
        (Fetch(TOPIC, 0, 1 << 40, wait_ms=-5), b""),
        (StreamOpen(TOPIC, 0, dice.randrange(50), dice.choice([0, -1, 1000, 1 << 62])), b""),
        (StreamCredit(dice.randrange(5), dice.choice([0, 10_000, -1])), b""),
        (StreamClose(dice.randrange(5)), b""),
        (GroupJoin("g", f"m{dice.randrange(5)}", topics=[TOPIC], session_ms=100), b""),
        (GroupLeave("g", f"m{dice.randrange(5)}"), b""),
        (GroupSeek("g", TOPIC, to=dice.choice(["offset", "earliest", "nowhere"]), offset=dice.randrange(9)), b""),
        (Commit("g", [place], member="m1"), b""),
        (Offsets(TOPIC, at=dice.choice(["latest", "time", "never"]), time_us=dice.randrange(1 << 60)), b""),
        (TopicList("*"), b""),
        (TopicDescribe(TOPIC), b""),
        (TopicAlter(TOPIC, {"message_bytes_max": dice.choice([1 << 20, -1, "x", None])}), b""),
        (TransactionBegin("t", timeout_ms=dice.choice([1000, 0, 1 << 50])), b""),
        (TransactionStage("t", dice.randrange(5), TOPIC, 0), batch(2)),
        (TransactionCommit("t", dice.randrange(5), places=[place]), b""),
        (TransactionAbort("t", dice.randrange(5)), b""),
        (Info(), b""),
        (Ping(), b""),
        (Hello(), b""),
        *subject_requests(dice),
    ]
    head, body = dice.choice(heads)
    return request(head, dice.randrange(1, 9), body)


def subject_requests(dice: Random) -> list[tuple[Request[Any], bytes]]:
    """Requests about subjects; their names and numbers meet others' by chance."""
    subject = dice.choice(["a", "a.b", "a.b.c", "$events.x", "a..b", "", "x" * 300])
    pattern = dice.choice(["a", "a.*", "#", ">", "a.#.c", "#." * 60 + "a", "*.>", "a.>.b", "$events.#"])
    error = dice.choice([None, ErrorObject("failed", "no"), ErrorObject("", "x" * 5000)])
    return [
        (SubjectPublish(subject), batch(dice.randrange(1, 20))),
        (SubjectPublish(subject), b"none"),
        (SubjectSubscribe(pattern, dice.choice(["", "q", "a/b"])), b""),
        (SubjectUnsubscribe(dice.randrange(50)), b""),
        (SwitchboardDescribe(), b""),
        (RequestSend(subject, dice.choice([-1, 0, 1, 50, 1 << 50])), b"value"),
        (ServeOpen(pattern, dice.choice([-1, 0, 1, 5, 1 << 40])), b""),
        (ServeClose(dice.randrange(50)), b""),
        (ReplySend(dice.randrange(200), error=error), b"reply"),
    ]


def mutated(data: bytes, dice: Random) -> bytes:
    """Bytes changed, taken out, put in, or repeated."""
    content = bytearray(data)
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(content) or 1)
        what = dice.randrange(5)
        if what == 0 and content:
            content[at] = dice.randrange(256)
        elif what == 1:
            del content[at : at + dice.randrange(1, 8)]
        elif what == 2:
            content[at:at] = dice.randbytes(dice.randrange(1, 8))
        elif what == 3:
            content[at:at] = content[at : at + 30]
        else:  # where numbers are that count most: lengths and kind
            content[: min(16, len(content))] = mutated_header(content[:16], dice)
    return bytes(content)


def mutated_header(header: bytearray, dice: Random) -> bytearray:
    changed = bytearray(header)
    if len(changed) == 16:
        at = dice.choice([0, 4, 5, 8, 12])
        changed[at : at + (1 if at in (4, 5) else 4)] = dice.randbytes(1 if at in (4, 5) else 4)
    return changed


def nonsense_head(dice: Random) -> bytes:
    """MessagePack that is fine, and means nothing."""
    names = ["topic", "partition", "offset", "group", "member", "places", "settings", "stream", "bytes", "features"]
    names += ["subject", "pattern", "queue", "responder", "request", "concurrency", "timeout_ms", "headers", "error"]
    contents = [None, -1, 1 << 63, "", "x" * 1000, [], {}, [{}], True, 1.5, b"b", {"a": [[[]]]}, TOPIC, 0]
    head = {dice.choice(names): dice.choice(contents) for _ in range(dice.randrange(6))}
    data = msgspec.msgpack.encode(head if dice.randrange(4) else dice.choice(contents))
    kind = dice.choice([*Kind, *range(256)])
    return bytes(frame(kind, dice.randrange(1 << 32), msgspec.Raw(data)))


def lying(dice: Random) -> bytes:
    """A batch whose checksums are right, and whose body is not what its header says; or a header that cannot be."""

    def seldom(good: Any, *bad: Any) -> Any:
        return good if dice.randrange(6) else dice.choice(bad)

    body = bytearray(msgspec.msgpack.encode([[b"v"], [b"k"], [1], [{"name": b"1"}], [None], [3], [None]]))
    for _ in range(dice.randrange(3)):
        body[dice.randrange(len(body))] = dice.randrange(256)
    count, span = seldom((1, 1), (2, 2), (1, 5), (0, 0), (1 << 16, 1 << 16), (1 << 31, 1 << 31))
    times = seldom((1, 1), (0, 0), (1 << 62, 1 << 62), (-(1 << 63), (1 << 63) - 1))
    producer = seldom((0, 0, 0), (1, 0, 0), (15, 0, 0), (dice.randrange(1 << 64), dice.randrange(2), 0))
    codec, flags = seldom(0, 1, 2, 77), seldom(0, 1, 2, 4, 65535)
    data = sealed(bytes(body), codec, flags, count, span, times, producer)
    if not dice.randrange(4):
        return request(TransactionBegin("t")) + request(TransactionStage("t", dice.randrange(5), TOPIC, 0), 2, data)
    return request(Publish(TOPIC, 0, durability=seldom(2, 0, -1, 99)), 1, data)


def sealed(
    body: bytes,
    codec: int = 0,
    flags: int = 0,
    count: int = 1,
    span: int = 1,
    times: tuple[int, int] = (1, 1),
    producer: tuple[int, int, int] = (0, 0, 0),
) -> bytes:
    """A batch with this body and header, and with the right checksum."""
    covered = struct.pack("<IBBHIIIqqQII", 96 + len(body), 2, codec, flags, count, span, 0, *times, *producer) + body
    return struct.pack("<4sIQqQIII", b"\xa7HRB", 0, 0, 0, 0, 0, 0, crc32c(covered)) + covered


def send(sock: socket.socket, data: bytes) -> None:
    """Send as much as the server takes before it hangs up."""
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)


def read_to_the_end(sock: socket.socket) -> bytes:
    """All that the server says; it must hang up, or be hung up on."""
    said = b""
    with contextlib.suppress(ConnectionError):
        sock.shutdown(socket.SHUT_WR)
        while more := sock.recv(1 << 16):
            said += more
    return said


def kinds_of(said: bytes) -> list[int]:
    """The kinds of the frames that a server sent."""
    frames, kinds = Frames(), []
    while said:
        buffer = frames.buffer()
        count = min(len(buffer), len(said))
        buffer[:count] = said[:count]
        kinds += [one.kind for one in frames.received(count)]
        said = said[count:]
    return kinds


ATTACKS: dict[str, Callable[[Random], bytes]] = {
    "random bytes": lambda dice: dice.randbytes(dice.randrange(1, 3000)),
    "random bytes after hello": lambda dice: HELLO + dice.randbytes(dice.randrange(1, 3000)),
    "mutated requests": lambda dice: HELLO + b"".join(mutated(valid(dice), dice) for _ in range(dice.randrange(1, 8))),
    "mutated hello": lambda dice: mutated(HELLO, dice) + valid(dice),
    "valid requests in any order": lambda dice: HELLO + b"".join(valid(dice) for _ in range(dice.randrange(1, 40))),
    "requests before hello": lambda dice: valid(dice) + HELLO,
    "nonsense in good frames": lambda dice: HELLO + b"".join(nonsense_head(dice) for _ in range(dice.randrange(1, 9))),
    "good frames cut short": lambda dice: HELLO + valid(dice)[: -dice.randrange(1, 17)],
    "batches that are none": lambda dice: HELLO + request(Publish(TOPIC, 0), 1, mutated(batch(5), dice)),
    "batches that lie about what is in them": lambda dice: HELLO + b"".join(lying(dice) for _ in range(5)),
    "subjects and requests": lambda dice: (
        HELLO
        + b"".join(
            request(head, dice.randrange(1, 9), body)
            for head, body in (dice.choice(subject_requests(dice)) for _ in range(dice.randrange(1, 40)))
        )
    ),
    "every kind with an empty head": lambda dice: HELLO + bytes(frame(dice.randrange(256), 1, {})),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_server_survives(attack: str, fortress: Fortress) -> None:
    dice = Random(attack)
    for _ in range(ROUNDS):
        with fortress.connect() as sock:
            send(sock, ATTACKS[attack](dice))
            if dice.randrange(3):
                said = read_to_the_end(sock)
                assert set(kinds_of(said)) <= {128, 129, 130, 131, 132, 136, 137}
    fortress.check()


def refusal(fortress: Fortress, data: bytes) -> str:
    """The code of the error with which a connection ends."""
    client = NativeClient(fortress.connect())
    with client:
        send(client.socket, data)
        with pytest.raises(HeadraceError) as caught:
            client.ask(Hello())
        with contextlib.suppress(ConnectionError), pytest.raises(EOFError):
            client.receive()
        return caught.value.code


@pytest.mark.parametrize(
    "data",
    [
        HELLO[:4] + HELLO[4:].replace(b"\x01\x01", b"\x02\x01", 1),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff" * 100,
        (0xFFFFFFFF).to_bytes(4, "little") + bytes(frame(Kind.HELLO, 1, {}))[4:],
        bytes(frame(Kind.HELLO, 0, 17)),
    ],
    ids=["ping first", "http", "ones", "four gigabytes", "hello is a number"],
)
def test_wrong_beginning_is_answered_with_a_protocol_error(data: bytes, fortress: Fortress) -> None:
    assert refusal(fortress, data) == "protocol_error"


def test_unknown_version_is_answered_so(fortress: Fortress) -> None:
    hello = bytes(frame(Kind.HELLO, 0, Hello(protocol_min=2, protocol_max=9)))
    assert refusal(fortress, hello) == "unsupported_version"


def test_unknown_kind_fails_that_request_only(fortress: Fortress) -> None:
    with fortress.good() as client:
        for kind in (0, 99, Kind.ANSWER, Kind.DRAIN, 255):
            client.socket.sendall(bytes(frame(kind, 77, {})))
            answer = client.receive()
            assert (answer.kind, answer.correlation) == (Kind.FAILURE, 77)
            assert b"unsupported_operation" in bytes(answer.head)
        client.ask(Ping())


def test_reason_arrives_even_when_the_client_is_still_sending(fortress: Fortress) -> None:
    with fortress.good() as client:
        huge = (0x7FFFFFFF).to_bytes(4, "little") + bytes(frame(Kind.PUBLISH, 5, {}))[4:]
        send(client.socket, huge + bytes(4 << 20))
        with pytest.raises(HeadraceError, match="at most"):
            client.ask(Ping())


def test_hundreds_of_hostile_connections_at_once(fortress: Fortress) -> None:
    dice = Random(1)
    announced = bytes(frame(Kind.PUBLISH, 1, Publish(TOPIC, 0), 32 << 20))
    with contextlib.ExitStack() as stack:
        for number in range(300):
            sock = stack.enter_context(fortress.connect())
            if number % 3 == 0:
                send(sock, HELLO + announced + bytes(dice.randrange(200_000)))
            elif number % 3 == 1:
                send(sock, HELLO[: dice.randrange(len(HELLO))])
            else:
                send(sock, HELLO + mutated(valid(dice), dice))
            if number % 50 == 0:
                fortress.check()
        fortress.check()
    fortress.check()


def test_large_frames_of_all_together_are_bounded(fortress: Fortress) -> None:
    announced = bytes(frame(Kind.PUBLISH, 1, Publish(TOPIC, 0), 32 << 20))
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(fortress.connect()) for _ in range(20)]
        for sock in socks:
            sock.settimeout(2)
            with contextlib.suppress(TimeoutError):
                send(sock, HELLO + announced + bytes(8 << 20))
        fortress.check()


def test_client_that_asks_and_never_listens_is_not_read_for_ever(fortress: Fortress) -> None:
    question = request(Fetch(TOPIC, 0, 0)) + request(TopicList()) + request(TopicDescribe(TOPIC))
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            sock = stack.enter_context(fortress.connect())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(0.5)
            sent = 0
            with contextlib.suppress(TimeoutError, ConnectionError):
                sock.sendall(HELLO)
                while sent < 256 << 20:
                    sent += sock.send(question * 500)
            assert sent < 64 << 20, "the server reads on and on"
        fortress.check()


def test_client_with_endless_credit_that_never_listens(fortress: Fortress) -> None:
    with fortress.good() as client:
        for _ in range(20):
            client.ask(Publish(TOPIC, 0), batch(1000, b"y" * 1000))
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            sock = stack.enter_context(fortress.connect())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(HELLO + b"".join(request(StreamOpen(TOPIC, 0, 0, 1 << 62), at) for at in range(1, 200)))
        time.sleep(0.5)
        fortress.check()


def test_subscriber_that_never_listens_loses_messages_and_costs_little(fortress: Fortress) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            sock = stack.enter_context(fortress.connect())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(HELLO + b"".join(request(SubjectSubscribe("flood.#"), at) for at in range(1, 50)))
        client = stack.enter_context(fortress.good())
        large = batch(100, b"y" * 1000)
        while client.ask(SubjectPublish("flood.a"), large).receivers:
            pass
        assert client.ask(SwitchboardDescribe()).dropped > 0
        fortress.check()


def test_flood_of_small_publishes_is_answered_whole(fortress: Fortress) -> None:
    one = batch(1)
    with fortress.good() as client:
        count = 5000
        flood = b"".join(request(Publish(TOPIC, 0), 10_000 + number, one) for number in range(count))
        sending = threading.Thread(target=client.socket.sendall, args=(flood,))
        sending.start()
        answered = set()
        while len(answered) < count:
            answer = client.receive()
            assert answer.kind == Kind.ANSWER
            answered.add(answer.correlation)
        sending.join()
        assert answered == set(range(10_000, 10_000 + count))
    fortress.check()


def test_bad_batch_among_good_ones_fails_alone(fortress: Fortress) -> None:
    """Small batches that arrive together are stored as one; nobody may suffer for another's."""
    body = msgspec.msgpack.encode([[b"v"], None, None, [{"name": b"1"}]]).replace(b"name", b"\xff\xfe\xfd\xfc")
    bodies = [batch(1), sealed(body), batch(1), sealed(b"\x91"), batch(1), sealed(b""), batch(1)]
    with fortress.good() as client:
        asked = [request(Publish(TOPIC, 0), 100 + number, one) for number, one in enumerate(bodies)]
        client.socket.sendall(b"".join(asked))
        answers = {answer.correlation - 100: answer for answer in (client.receive() for _ in bodies)}
    for number, answer in answers.items():
        assert answer.kind == (Kind.FAILURE if number % 2 else Kind.ANSWER), bytes(answer.head)
        assert number % 2 == 0 or b"invalid_batch" in bytes(answer.head)


def test_streams_are_limited(fortress: Fortress) -> None:
    with fortress.good() as client:
        client.socket.sendall(b"".join(request(StreamOpen(TOPIC, 0, 0, 0), at) for at in range(1, 4102)))
        codes = [client.receive().kind for _ in range(4101)]
        assert codes.count(Kind.FAILURE) == 5
        client.ask(Ping())
    fortress.check()


@settings(max_examples=ROUNDS // 3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(hostile_batch(), min_size=1, max_size=5))
def test_hostile_batches_are_refused_with_a_code_or_read_again(fortress: Fortress, batches: list[bytes]) -> None:
    with fortress.good() as client:
        client.ask(TopicCreate("hostile", exist_ok=True))
        client.ask(SubscriptionCreate("hostile", exist_ok=True))
        for one in batches:
            try:
                offset = client.ask(Publish("hostile", 0), one).base_offset
            except HeadraceError as error:
                assert error.code != "internal_error"  # noqa: PT017
                continue
            _, body = client.ask_for_batches(Fetch("hostile", 0, offset))
            stored = parse(memoryview(body))
            stored.verify()
            assert len(list(stored.messages())) == stored.count
        answer, body = client.ask_for_batches(Lease("hostile", messages_max=100, ahead_ms=60_000))
        jobs = leased_jobs("hostile", "default", answer, body)
        client.ask(Ack("hostile", holdings_of(jobs)))
    fortress.check()


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
def test_leases_of_much_more_than_was_asked_for_take_no_memory(fortress: Fortress, codec: Codec) -> None:
    topic = f"bombs.{codec.name.lower()}"
    bomb = bytes(encode(Columns([bytes(1_000_000)] * 8), 1_700_000_000_000_000, codec=codec).data)
    with fortress.good() as client:
        client.ask(TopicCreate(topic))
        for _ in range(60):
            client.ask(Publish(topic, 0), bomb)
        for discipline in ("fifo", "lifo", "priority"):
            client.ask(SubscriptionCreate(topic, discipline, {"discipline": discipline}))
            for bytes_max in (1, 1, 4 << 20):
                answer, _ = client.ask_for_batches(Lease(topic, discipline, 480, bytes_max))
                assert [len(portion.all_offsets) for portion in answer.portions] == [max(bytes_max // 1_000_000, 1)]
                fortress.check()
