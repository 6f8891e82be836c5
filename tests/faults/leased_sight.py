"""What a broker says about a leased subscription, and whether that is what it should."""

from dataclasses import dataclass, field

from tests.faults.leased_world import Entry, Id, Message, Subscription, World

from headrace.broker.pending_answer import AnswerWithBody
from headrace.model.batch import parse
from headrace.model.leasing import Find, Found, FoundMessage, Selection
from headrace.model.message import Message as Read
from headrace.testing.workbench import Workbench

TOPIC = "jobs"
DEAD = "jobs.dead"


@dataclass
class Seen:
    """All messages that a subscription has, as it says."""

    pending: dict[Id, tuple[FoundMessage, Read]] = field(default_factory=dict)
    dead: dict[Id, tuple[FoundMessage, Read]] = field(default_factory=dict)
    """By where they were before they died."""


def contents(body: bytes | bytearray | memoryview) -> list[Read]:
    """The messages of an answer's body; what its batches say of offsets does not count."""
    view, messages = memoryview(body), list[Read]()
    while view:
        batch = parse(view)
        batch.verify()
        messages += batch.messages()
        view = view[batch.length :]
    return messages


def find(bench: Workbench, name: str, selection: Selection, page: int = 100) -> list[tuple[FoundMessage, Read]]:
    """All messages that are selected, page by page."""
    found, after = [], ""
    while True:
        answer = bench.ask(Find(TOPIC, selection, name, page, after))
        words, body = answer if isinstance(answer, AnswerWithBody) else (answer, b"")
        assert isinstance(words, Found)
        assert len(words.messages) <= page
        found += zip(words.messages, contents(body), strict=True)
        if not words.after:
            return found
        assert words.after != after, "the pages do not end"
        after = words.after


def look(bench: Workbench, name: str, page: int = 100) -> Seen:
    """Everything that there is to be seen."""
    seen = Seen()
    for one, message in find(bench, name, Selection(), page):
        assert (one.partition, one.offset) not in seen.pending, f"{one} is found twice"
        seen.pending[one.partition, one.offset] = one, message
    assert list(seen.pending) == sorted(seen.pending), "not in the order of partition and offset"
    for one, message in find(bench, name, Selection(status="dead"), page):
        headers = message.headers or {}
        assert headers["headrace-dead-subscription"] == name.encode()
        origin = int(headers["headrace-dead-partition"]), int(headers["headrace-dead-offset"])
        assert origin not in seen.dead, f"{origin} is dead twice"
        seen.dead[origin] = one, message
    return seen


def differs(one: Subscription, at: Id, entry: Entry | None, message: Message, seen: Seen, now_us: int) -> str | None:
    """In what a subscription has another idea of a message than it should have."""
    found = seen.pending.get(at)
    view = World({at: message}, {one.name: one})
    if entry is not None and entry.fate == "pending" and view.stale(at, now_us) and not entry.leased(now_us):
        return None  # it may go at any moment
    if entry is not None and entry.fate == "pending" and found is None:
        return "it is not there"
    if (entry is not None and entry.fate == "dead") != (at in seen.dead):
        return f"dead is {at in seen.dead}"
    if entry is None or entry.fate != "pending" or found is None:
        return f"it is there as {found[0]}" if found is not None else None
    status = view.status(at, entry, now_us)
    said = found[0]
    if said.status != status:
        return f"it is {said.status}, not {status}"
    if (said.deliveries, said.version) != (entry.deliveries, message.version):
        return f"delivered {said.deliveries} times, version {said.version}"
    if status == "leased" and (said.holder, said.until_us) != (entry.holder, entry.until_us):
        return f"{said.holder} has it until {said.until_us}"
    if status == "waiting" and said.ready_us != view.ready_us(at, entry):
        return f"it is ready at {said.ready_us}, not {view.ready_us(at, entry)}"
    if status == "ready" and said.ready_us > now_us:
        return f"it is ready, but only at {said.ready_us}"
    return content_differs(message, found[1])


def content_differs(message: Message, read: Read) -> str | None:
    """In what a message that was read is not what it should be."""
    for name, mine, other in (
        ("value", message.value, read.value),
        ("key", message.key, read.key),
        ("headers", message.headers, read.headers or {}),
        ("due", message.due_us, read.due),
        ("priority", message.priority or 0, read.priority or 0),
        ("expires", message.expires_us, read.expires),
    ):
        if mine != other:
            return f"its {name} is {other!r}, not {mine!r}"
    return None
