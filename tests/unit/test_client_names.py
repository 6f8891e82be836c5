"""What users see of the client's objects: public names, what they say of themselves, and what brokers call them."""

import asyncio
import inspect
import os
import pydoc
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.client.connection import identity
from headrace.errors import InvalidArgument
from headrace.model.representation import short
from headrace.server import EmbeddedServer

BUS = """
alter_subscription alter_topic audit auth clock close cluster commit create_subscription create_topic cron_add cron_next
cron_pause cron_remove cron_run crons delete_group delete_subscription delete_topic describe_group
describe_subscription describe_topic events fetch groups history info job_result lease logging name offsets producer
publish publish_many queue request reset_subscription routes schedule scheduled seek_group services subjects subscribe
subscriptions tenant tenants topics transaction trim_topic webhooks
"""
PUBLIC = {
    "App": "close deliver every on run serves stop task",
    "Bus": BUS,
    "Cursor": "close commit committed lag messages name offset seek tail",
    "Jobs": "close stop",
    "LiveSubscription": "begin close dropped pattern queue stop",
    "Log": """
        append append_many batches close compact consume cursor cursors find_time first_offset flush info messages
        next_offset path read readonly recovery tail trim truncate_before verify wait
    """,
    "Producer": "close flush publish publish_many send send_many topic",
    "Queue": """
        ack edit_matching extend find find_pages forecast jobs lease leased pause peek redrive reject release resume
        stats subscription topic
    """,
    "Scheduled": "cancel id look move offset owner partition topic topic_id update version",
    "Sent": "done result",
    "SentMany": "done result",
    "Subjects": "info publish publish_many subscribe",
    "Subscription": "assigned batches begin close commit group lag run seek skipped stop topics",
    "Transaction": """
        abort adopt_stages already_committed begin commit commit_positions epoch join metadata name outcome publish
        publish_many sequence stage staged
    """,
}


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    server = EmbeddedServer(tmp_path / "data", host="", unix_socket=f"{tmp_path}/s")
    yield f"headrace+unix://{tmp_path}/s"
    server.close()


def objects(bus: headrace.Bus, tmp_path: Path) -> list[Any]:
    """One object of each public class of the client, and of the embedded log."""
    bus.publish("t", b"x")
    log = headrace.Log(tmp_path / "log")
    producer = bus.producer("t")
    return [
        bus,
        headrace.App(bus),
        bus.queue("t"),
        bus.queue("t").jobs(),
        bus.subscribe("t"),
        producer,
        producer.send(b"y"),
        producer.send_many([b"z"]),
        bus.transaction("x"),
        bus.schedule("t", b"later", in_=3600),
        log,
        log.cursor("c"),
        bus.subjects,
        bus.subjects.subscribe("t"),
    ]


def test_only_what_is_meant_for_users_is_public(address: str, tmp_path: Path) -> None:
    with headrace.connect(address) as bus:
        seen = {}
        for thing in objects(bus, tmp_path):
            seen[type(thing).__name__] = {name for name in dir(thing) if not name.startswith("_")}
            close = getattr(thing, "close", None)
            if close is not None and thing is not bus:
                close()
    assert seen == {name: set(names.split()) for name, names in PUBLIC.items()}


INHERITS = {
    "Bus": "BusAdministration BusObservation BusParts ABC",
    "Queue": "QueueInspection",
    "Sent": "PendingResult",
    "SentMany": "PendingResult",
}
ATTRIBUTES = {
    "LiveSubscription": "pattern queue",
    "Queue": "subscription topic",
    "Scheduled": "offset owner partition topic topic_id version",
    "Subscription": "group topics",
    "Transaction": "name outcome",
}
"""Public names that only the objects have, not their classes."""


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - {"Log", "Cursor"}))
def test_a_class_of_the_client_is_composed_and_shows_all_its_names(name: str) -> None:
    for face in (name, f"Async{name}"):
        kind = getattr(headrace, face)
        assert [base.__name__.removeprefix("Async") for base in kind.__mro__[1:-1]] == INHERITS.get(name, "").split()
        public = {attribute for attribute in dir(kind) if not attribute.startswith("_")}
        assert public | set(ATTRIBUTES.get(name, "").split()) == set(PUBLIC[name].split())
        undocumented = [attribute for attribute in public if not inspect.getdoc(getattr(kind, attribute))]
        assert undocumented == []


FIELDS = ["headers", "timestamp", "due", "priority", "expires", "partition"]
COLUMNS = ["headers", "timestamps", "dues", "priorities", "expires"]


@pytest.mark.parametrize("method", ["Bus.publish", "Producer.publish", "Producer.send", "Transaction.publish"])
def test_help_lists_the_fields_of_a_message_for_every_method_that_publishes(method: str) -> None:
    for face in ("", "Async"):
        kind, name = (face + method).split(".")
        one, many = (getattr(getattr(headrace, kind), each) for each in (name, f"{name}_many"))
        assert list(inspect.signature(one).parameters)[-len(FIELDS) :] == FIELDS
        assert list(inspect.signature(many).parameters)[-len(COLUMNS) :] == COLUMNS
        assert "priority" in pydoc.render_doc(one)


def test_an_unknown_field_of_a_message_is_refused(address: str) -> None:
    with headrace.connect(address) as bus, bus.producer("t") as producer, bus.transaction("x") as transaction:
        refused: list[Callable[[], object]] = [
            lambda: bus.publish("t", b"x", prio=1),  # type: ignore[call-arg]
            lambda: bus.publish_many("t", [b"x"], prios=[1]),  # type: ignore[call-arg]
            lambda: producer.send(b"x", prio=1),  # type: ignore[call-arg]
            lambda: producer.publish(b"x", prio=1),  # type: ignore[call-arg]
            lambda: transaction.publish("t", b"x", prio=1),  # type: ignore[call-arg]
        ]
        for call in refused:
            with pytest.raises(TypeError, match="nexpected keyword argument 'prio"):
                call()


@pytest.mark.parametrize("name", [name for name in PUBLIC if hasattr(headrace, f"Async{name}")])
def test_both_faces_have_the_same_public_names(name: str) -> None:
    def names(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}

    assert names(getattr(headrace, name)) == names(getattr(headrace, f"Async{name}"))


def test_everything_says_in_one_line_what_it_is(address: str, tmp_path: Path) -> None:
    with headrace.connect(address, name="me") as bus:
        things = objects(bus, tmp_path)
        transaction = bus.transaction("x" * 1000, sequence=7)
        said = [repr(thing) for thing in [*things, transaction, bus.lease("t")]]
        assert said[0] == f"<Bus {address} name='me' connected>"
        assert said[1] == f"<App {said[0]} handlers=0 not running>"
        assert said[2:6] == [
            "<Queue t subscription='default'>",
            "<Jobs t subscription='default' not begun>",
            "<Subscription 't' partitions=0 not begun>",
            said[5],
        ]
        assert re.fullmatch(r"<Producer 't' unacknowledged_bytes=\d+>", said[5])
        assert re.fullmatch(r"<Sent (on its way|acknowledged)>", said[6])
        assert re.fullmatch(r"<SentMany batches=1 (on its way|acknowledged)>", said[7])
        assert said[8] == "<Transaction 'x' not begun>"
        assert said[9].startswith("<Scheduled t/0/")
        assert re.fullmatch(r"<Log '.*/log'>", said[10])
        assert said[11] == "<Cursor 'c' offset=0 committed=0>"
        assert said[12] == f"<Subjects {said[0]}>"
        assert said[13] == "<LiveSubscription t dropped=0 not begun>"
        assert "sequence=7" in said[14]
        assert len(said[14]) < 120
        assert said[15] == "<LeasedBlock t subscription='default' messages=0>"
        assert not any("\n" in line or " at 0x" in line for line in said)
        for thing in things[1:]:
            if hasattr(thing, "close"):
                thing.close()
    assert repr(bus) == f"<Bus {address} name='me' closed>"
    for thing in things:
        assert "closed" in repr(thing) or not hasattr(thing, "close")


def test_what_a_closed_bus_has_made_says_that_it_is_closed(address: str) -> None:
    with headrace.connect(address) as bus:
        made = [bus.queue("t"), bus.lease("t"), bus.queue("t").jobs(), bus.subscribe("t"), bus.producer("t")]
        made += [bus.transaction("x"), bus.schedule("t", b"x", in_=60)]
        assert not any("closed" in repr(thing) for thing in made)
    assert [repr(thing) for thing in made if not repr(thing).endswith(" closed>")] == []


def test_a_clock_says_what_it_knows(address: str) -> None:
    assert re.fullmatch(r"<Clock offset_us=-?\d+ error_us=\d+ age_s=\S+ not compared>", repr(headrace.Clock()))
    with headrace.connect(address) as bus:
        assert re.fullmatch(r"<Clock offset_us=-?\d+ error_us=\d+ age_s=\S+( not compared)?>", repr(bus.clock))


def test_subscriptions_and_transactions_tell_how_far_they_are(address: str) -> None:
    with headrace.connect(address) as bus:
        bus.publish("t", b"x")
        with bus.subscribe("t", group="g", pattern="u*") as subscription:
            assert repr(subscription) == "<Subscription 't u*' group='g' partitions=1 reading>"
        assert repr(subscription).endswith("closed>")
        with bus.transaction("x") as transaction:
            assert repr(transaction) == "<Transaction 'x' sequence=0 open>"
        assert repr(transaction) == "<Transaction 'x' sequence=0 committed>"


def test_what_was_never_finished_can_be_shown() -> None:
    for name in PUBLIC:
        kind = getattr(headrace, name)
        assert repr(kind.__new__(kind)) == f"<{name} unfinished>"


def test_the_async_face_says_the_same() -> None:
    async def story() -> list[str]:
        async with await headrace.open_async(":memory:", name="me") as bus:
            await bus.publish("t", b"x")
            return [repr(bus), repr(bus.queue("t")), repr(bus.subscribe("t")), repr(headrace.AsyncApp(bus))]

    first, *others = asyncio.run(story())
    assert first == "<AsyncBus embedded name='me' connected>"
    assert others == [
        "<AsyncQueue t subscription='default'>",
        "<AsyncSubscription 't' partitions=0 not begun>",
        f"<AsyncApp {first} handlers=0 not running>",
    ]


def test_an_address_with_a_password_is_not_shown() -> None:
    assert "secret" not in repr(headrace.App("headrace://me:secret@127.0.0.1:7390"))


class Awkward:
    def __repr__(self) -> str:
        raise RuntimeError


def test_long_and_awkward_values_are_cut() -> None:
    message = headrace.Received(5, bytes(1 << 20), 17, key=b"k", topic="t")
    expected = f"Received(offset=5, value={bytes(32)!r}... (1048576 bytes), timestamp=17, key=b'k', topic='t')"
    assert repr(message) == expected
    assert repr(headrace.Message(1, None, 2)) == "Message(offset=1, value=None, timestamp=2)"
    for value in (
        "x" * 1000,
        "a\nb",
        {"a": ["b" * 1000] * 1000},
        10**5000,
        Awkward(),
        memoryview(bytes(1000)),
        object(),
    ):
        text = short(value)
        assert len(text) < 500
        assert "\n" not in text
        assert short(value) in repr(headrace.OutgoingMessage("t", value))
    with headrace.Log(":memory:") as log:
        log.append(b"x")
        log.flush()
        (batch,) = log.batches()
    assert re.fullmatch(r"<Batch offsets 0 to 0, 1 messages, \d+ bytes>", repr(batch))


# What brokers call a client.


def test_a_client_is_named_after_host_and_process(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "caf\xe9 1." + "x" * 300)
    with headrace.connect(address) as bus, headrace.connect(address) as other:
        assert re.fullmatch(rf"caf-1\.x+-{os.getpid()}-\d+", bus.name)
        assert len(bus.name) < identity.NAME_CHARS_MAX
        assert bus.name != other.name
        bus.publish("t", b"x")
        with bus.subscribe("t", group="g"):
            ((member, client),) = bus.describe_group("g").members.items()
            assert client == bus.name
            assert member.startswith(f"{bus.name[:100]}-")
        with bus.lease("t"):
            (held,) = other.queue("t").find(status="leased")
            assert held.holder == bus.name
    monkeypatch.setattr(socket, "gethostname", lambda: "...")
    assert identity.default_name().startswith(f"host-{os.getpid()}-")


def test_a_program_can_name_itself(address: str) -> None:
    with headrace.connect(address, name="billing 1") as bus:
        assert bus.name == "billing 1"
        bus.publish("t", b"x")
        with bus.subscribe("t", group="g"):
            ((member, client),) = bus.describe_group("g").members.items()
            assert (client, member.rpartition("-")[0]) == ("billing 1", "billing 1")
    for name in ("x" * 121, "a\nb", 5):
        with pytest.raises(InvalidArgument):
            headrace.connect(address, name=name)


def test_members_of_processes_with_the_same_name_are_told_apart() -> None:
    assert identity.member_id("web-1") != identity.member_id("web-1")
    assert len(identity.member_id("x" * 120)) <= 200


def test_only_the_connection_knows_the_kinds_of_frames() -> None:
    client = Path(headrace.__file__).parent / "client"
    knows = [path for path in client.rglob("*.py") if re.search(r"\bKind\b", path.read_text(encoding="utf-8"))]
    assert [path.relative_to(client).as_posix() for path in knows] == ["connection/request_router.py"]
