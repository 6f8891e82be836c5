"""How leased subscriptions are asked for something in the model of a broker, and what must be answered."""

from dataclasses import replace
from typing import Any

from tests.faults.leased_model import Key, LeaseBooks
from tests.faults.leased_sight import TOPIC, content_differs, contents
from tests.faults.leased_world import Entry, Id, World

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.model.batch import Columns, encode
from headrace.model.errors import HeadraceError
from headrace.model.leasing import (
    Ack,
    Edit,
    EditOutcome,
    Extend,
    Holding,
    Lease,
    Leased,
    MessageChange,
    MessageId,
    Reject,
    Release,
    Settlement,
)
from headrace.model.subscription import Rejected


class Asking(LeaseBooks):
    """Requests with their effects on the world."""

    def take(self, request: Lease, holder: str) -> None:
        """Lease messages; exactly those that are next must be handed out."""
        name, now_us = request.subscription, self.now_us
        one = self.world.subscriptions[name]
        lease_us = request.lease_ms * 1000 or round(one.settings.lease_seconds * 1e6)
        eligible = self.world.eligible(name, now_us, request.ahead_ms * 1000)
        self.asked_of = name
        handed_out = {at: self.handed_out(name, at, -1, holder, lease_us) for at in eligible}
        ends_us = {entry.until_us for entry in handed_out.values()}
        # The lease of those that are handed out together begins when the last of them is due.
        self.leasing = {
            at: [replace(entry, until_us=end_us) for end_us in ends_us if end_us >= entry.until_us]
            for at, entry in handed_out.items()
        }

        def ask() -> Any:
            answer = self.bench.begin(request, b"", self.sessions[holder])
            if isinstance(answer, PendingAnswer):
                self.bench.run()
                answer = answer.outcome
            return answer

        answer = self.attempt(ask)
        self.leasing = {}
        if answer is None:
            return
        assert not isinstance(answer, HeadraceError), repr(answer)
        words, body = answer if isinstance(answer, AnswerWithBody) else (answer, b"")
        self.check_lease(request, holder, lease_us, eligible, words, body)

    def handed_out(self, name: str, at: Id, token: int, holder: str, lease_us: int) -> Entry:
        """A message's entry when it is handed out now."""
        world = self.world
        entry = world.subscriptions[name].entries[at]
        until_us = max(self.now_us, world.ready_us(at, entry)) + lease_us
        return replace(
            entry,
            deliveries=min(entry.deliveries + 1, 255),
            token=token,
            holder=holder,
            until_us=until_us,
            doubtful=token < 0,
        )

    def check_lease(
        self, request: Lease, holder: str, lease_us: int, eligible: list[Id], words: Leased, body: Any
    ) -> None:
        name, world, reads = request.subscription, self.changed(), contents(body)
        entries = world.subscriptions[name].entries
        queues = []
        for portion in words.portions:
            count = len(portion.all_offsets)
            assert count, "an empty portion"
            assert not portion.deliveries or len(portion.deliveries) == count
            assert not portion.versions or len(portion.versions) == count
            for at, read in enumerate(reads[:count]):
                offset = portion.all_offsets[at]
                expected = world.messages[portion.partition, offset]
                entry = entries[portion.partition, offset]
                why = content_differs(expected, read)
                assert why is None, f"{expected.id}: {why}"
                assert (portion.deliveries or [1] * count)[at] == entry.deliveries + 1, f"{expected.id}: {portion}"
                assert (portion.versions or [1] * count)[at] == expected.version, f"{expected.id}: {portion}"
                assert entry.doubtful or portion.states.get(offset) == entry.state, f"{expected.id}: {portion}"
            ids = [(portion.partition, offset) for offset in portion.all_offsets]
            until_us = max(self.handed_out(name, at, 1, holder, lease_us).until_us for at in ids)
            assert portion.until_us == until_us, f"{portion} should end at {until_us}"
            del reads[:count]
            queues.append([(portion.partition, offset) for offset in portion.all_offsets])
        assert not reads
        self.check_order(request, eligible, [list(queue) for queue in queues])
        for portion, queue in zip(words.portions, queues, strict=True):
            for at in queue:
                handed_out = self.handed_out(name, at, portion.lease, holder, lease_us)
                entries[at] = replace(handed_out, until_us=portion.until_us)
                self.tokens.append((name, at, portion.lease))
        self.check_tokens(words)
        self.count([("entry", name, at) for queue in queues for at in queue], synced=False)()

    def check_tokens(self, words: Leased) -> None:
        """A token is never given twice: who lost a lease in a power loss would settle another's."""
        for portion in words.portions:
            assert portion.lease > 0
        fresh = {portion.lease for portion in words.portions}
        assert not fresh & self.granted, f"tokens {fresh & self.granted} were given before"
        self.granted |= fresh

    def check_order(self, request: Lease, eligible: list[Id], queues: list[list[Id]]) -> None:
        """What is handed out is what comes first, in order; and it is as much as there is, or as is wished."""
        name, world, now_us = request.subscription, self.world, self.now_us
        left, count, bytes_least, bytes_most = list(eligible), 0, 0, 0
        one = world.subscriptions[name]
        while any(queues):
            firsts = world.first(name, left, now_us)
            heads = [queue for queue in queues if queue and queue[0] in firsts]
            given = [queue[0] for queue in queues if queue]
            assert heads, f"{given} were handed out, when {firsts} were next"
            at = heads[0].pop(0)
            message = world.messages[at]
            left.remove(at)
            if one.settings.ordered_by_key and message.key is not None:
                left = [other for other in left if world.messages[other].key != message.key]
            count += 1
            bytes_least += len(message.value)
            bytes_most += message.size + 100
        assert count <= request.messages_max
        assert count < 2 or bytes_least <= request.bytes_max, "more than was asked for"
        left = [at for at in left if not world.may_wait(name, at, now_us)]
        if left and count < request.messages_max:
            following = [world.messages[at].size + 100 for at in world.first(name, left, now_us)]
            assert count, f"nothing was handed out, though {left} are ready"
            assert bytes_most + max(following) > request.bytes_max, f"{left} were not handed out"

    def remembered(self) -> bool:
        """Whether a new subscription sees every message as it is now: edits of what all are done with are forgotten."""
        pending = {at for name in self.world.subscriptions for at, _ in self.world.pending(name)}
        return all(message.version == 1 or at in pending for at, message in self.world.messages.items())

    # Settling.

    def settle(self, request: Any, holder: str, held: list[tuple[Id, int]]) -> None:
        """Ack, extend, release or reject; `held` are the messages with the tokens that are given for them."""
        self.await_answers([at for at, _ in held])
        name, now_us, before = request.subscription, self.now_us, self.world
        if name not in before.subscriptions:
            return
        possible = {at: before.refusals(name, at, token, now_us, ack=isinstance(request, Ack)) for at, token in held}
        unclear = any("" in codes or self.doubtful(name, at) for at, codes in possible.items())
        if unclear:
            self.run()
            tried, self.asked_of = self.world.copy(), name
            entries = tried.subscriptions[name].entries if name in tried.subscriptions else {}
            tokens = [at for at, _ in held if at in entries and entries[at].fate == "pending"]
            for at in tokens:
                self.apply(tried, request, at, now_us)
            self.leasing = {at: [entries[at]] for at in tokens}  # if the power goes off, it may have been done
            answer = self.answer(request, holder=holder)
            self.leasing = {}
            if answer is None:
                return
            refused = {(one.partition, one.offset): one.code for one in answer.refused}
            done = [at for at, _ in held if at not in refused]
        else:
            done = [at for at, codes in possible.items() if not codes]
        world = self.changed()
        for at in done:
            self.apply(world, request, at, now_us)
        counts = self.count([("entry", name, at) for at in done], synced=not isinstance(request, Extend))
        if unclear:
            counts()
            return

        def told(answer: Settlement) -> None:
            counts()
            refused = {(one.partition, one.offset): one.code for one in answer.refused}
            assert len(refused) == len(answer.refused)
            for at, codes in possible.items():
                code = refused.pop(at, "")
                assert code in (codes or {""}), f"{request} of {at}: {code!r} instead of {codes or 'done'}"
            assert not refused, f"{refused} were not asked for"

        self.in_flight.update((name, at) for at in done)
        self.ask(request, told, holder=holder)

    def doubtful(self, name: str, at: Id) -> bool:
        entry = self.world.subscriptions[name].entries.get(at)
        return entry is not None and entry.doubtful

    def apply(self, world: World, request: Any, at: Id, now_us: int) -> None:
        """What settling a message does to it."""
        one = world.subscriptions[request.subscription]
        entry = one.entries[at]
        if isinstance(request, Ack):
            entry.fate = "done"
        elif isinstance(request, Extend):
            entry.until_us = now_us + (request.lease_ms * 1000 or round(one.settings.lease_seconds * 1e6))
        elif isinstance(request, Reject):
            entry.fate = "done" if one.settings.rejected is Rejected.DROP else "dead"
            entry.reason = request.reason
        elif isinstance(request, Release):
            rests_us = now_us + one.settings.retry_us(entry.deliveries, 0.5)
            if request.delay_ms is not None:
                rests_us = now_us + request.delay_ms * 1000
            if request.until_us is not None:
                rests_us = request.until_us
            if at[1] in request.states:
                entry.state = request.states[at[1]]
            if request.undelivered:
                entry.deliveries -= 1
                entry.holder, entry.rests_us = "", rests_us
            else:
                world.give_back(one, at, request.reason, rests_us)
            entry.token = 0

    # Editing.

    def edit(self, ids: list[tuple[Id, int | None]], change: MessageChange, owner: str, new: Any) -> None:
        """Edit messages; each is changed if nothing speaks against it."""
        self.await_answers([at for at, _ in ids])
        if any(self.unclear(at) for at, _ in ids):
            return
        request = Edit(TOPIC, [MessageId(*at, version) for at, version in ids], change, owner)
        expected = self.expected_edits(ids, change, owner, new)
        keys: list[Key] = [("message", at) for at, _ in ids]
        keys += [("entry", name, at) for at, _ in ids for name in self.world.subscriptions]
        counts = self.count(keys, synced=True)

        def told(answer: Any) -> None:
            counts()
            assert len(answer.outcomes) == len(expected)
            for outcome, ((at, _), (codes, version)) in zip(
                answer.outcomes, zip(ids, expected, strict=True), strict=True
            ):
                self.check_outcome(outcome, at, codes, version)

        self.ask(request, told, self.body(change, new))

    def body(self, change: MessageChange, new: Any) -> bytes:
        if not change.replace:
            return b""
        value, headers = new
        return bytes(encode(Columns([value], headers=[headers]), self.now_us).data)

    def unclear(self, at: Id) -> bool:
        """Whether it may be gone or not: it has expired, or one subscription is done with it and another is not."""
        entries = [one.entries.get(at) for one in self.world.subscriptions.values()]
        fates = {entry is not None and entry.fate == "pending" for entry in entries}
        return at in self.world.messages and (self.world.stale(at, self.now_us) or len(fates) > 1)

    def check_outcome(self, outcome: EditOutcome, at: Id, codes: set[str], version: int) -> None:
        assert (outcome.partition, outcome.offset) == at
        assert outcome.outcome in (codes or {"applied"}), f"{outcome}, but {codes or 'nothing'} speaks against it"
        if outcome.outcome in ("applied", "stale_version"):
            assert outcome.version == version, f"{outcome}, but the version is {version}"
        if outcome.outcome == "message_leased":
            assert outcome.holder in ("ann", "bob"), outcome

    def expected_edits(
        self, ids: list[tuple[Id, int | None]], change: MessageChange, owner: str, new: Any
    ) -> list[tuple[set[str], int]]:
        """Change the world; returns what is to be answered, and the versions."""
        world, now_us = self.changed(), self.now_us
        expected = []
        for at, version in ids:
            codes = world.objections(at, version, owner, now_us)
            if change.delete and at not in self.lost and world.was_deleted(at, version, owner):
                codes = set()  # whoever lost the answer asks again
            elif not codes:
                changes: dict[str, Any] = {}
                if change.due_us is not None:
                    changes["due_us"] = change.due_us
                elif change.shift_us:
                    changes["due_us"] = world.shifted_from_us(at, now_us) + change.shift_us
                if change.priority is not None:
                    changes["priority"] = change.priority
                if change.replace:
                    changes["value"], changes["headers"] = new
                world.edit(at, deleted=change.delete, **changes)
            message = world.messages.get(at)
            expected.append((codes, message.version if message is not None else 0))
        return expected

    def holdings(self, held: list[tuple[Id, int]], together: bool) -> list[Holding]:
        """What is held, message by message or lease by lease."""
        if not together:
            return [Holding(at[0], token, [at[1]]) for at, token in held]
        groups: dict[tuple[int, int], list[int]] = {}
        for at, token in held:
            groups.setdefault((at[0], token), []).append(at[1])
        return [Holding(number, token, offsets) for (number, token), offsets in groups.items()]
