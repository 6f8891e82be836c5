"""A broker on a disk that fails, against plain dictionaries: what was acknowledged is there, in order, exactly once."""

import os

from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.faults.broker_model import ANY, IN_FLIGHT, KINDS, NAMES, PRODUCERS, TRANSACTIONS, Books, Sent, Topic

from headrace.model.batch import NO_PRODUCER, Producer
from headrace.model.errors import (
    LogFailed,
    ProducerFenced,
)
from headrace.model.requests import (
    Commit,
    PartitionOffset,
    Publish,
    TopicCreate,
    TopicDelete,
    TopicList,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
)
from headrace.testing import PowerLoss, Unsynced


class BrokerOnAFaultyDisk(Books):
    """Whatever was asked and not answered may have happened or not, but all or nothing; what was answered has."""

    @rule(topic=ANY)
    def create(self, topic: int) -> None:
        name = NAMES[topic % 3]
        if name not in self.topics:
            made = self.topics[name] = Topic(name, KINDS[name])
            self.ask(TopicCreate(name, {**KINDS[name], "segment_bytes": 4096}), lambda answer: self.learn(made, answer))
            self.run()
            there = [info.topic for info in self.bench.begin(TopicList()).topics]
            if self.topics.get(name) is made and name not in there:
                self.forget(name)  # the disk was full

    @rule(topic=ANY)
    def delete(self, topic: int) -> None:
        name = NAMES[topic % 3]
        self.run()
        if self.known(topic):
            self.doubtful.add(name)
            self.ask(TopicDelete(name), lambda _: self.forget(name))
            self.run()
            if not self.failed:
                self.doubtful.discard(name)  # it is there if the disk was full

    @rule(
        sends=st.lists(st.tuples(ANY, st.integers(0, 3), st.booleans()), min_size=1, max_size=6), answered=st.booleans()
    )
    def publish(self, sends: list[tuple[int, int, bool]], answered: bool) -> None:
        """The next batches of producers, or of nobody; small ones that come together become one."""
        for topic, by, large in sends:
            spot, values = self.spot(topic), self.values(17 if large else 1 + topic % 3)
            if by == len(PRODUCERS):
                self.loose.append(Sent(spot, NO_PRODUCER, values))
                self.send(self.loose[-1])
                continue
            key = PRODUCERS[by], *spot
            batches = self.batches.setdefault(key, [])
            if sum(batch.base is None for batch in batches) < IN_FLIGHT:
                producer = Producer(key[0], self.epochs.setdefault(key, 0), len(batches))
                batches.append(Sent(spot, producer, values))
                self.send(batches[-1])
        if answered:
            self.run()

    @precondition(lambda self: any(self.batches.values()))
    @rule(back=st.integers(0, 3))
    def publish_again(self, back: int) -> None:
        """Producers repeat what they have no answer for, and sometimes what they have one for."""
        for key, batches in list(self.batches.items()):
            waiting = [number for number, batch in enumerate(batches) if batch.base is None]
            for batch in batches[max((waiting or [len(batches)])[0] - back, 0) :]:
                if batch in self.batches.get(key, ()):  # else the power went off since, and its producer begins anew
                    self.send(batch)
        self.run()

    @precondition(lambda self: any(self.batches.values()))
    @rule(which=ANY)
    def begin_new_epoch(self, which: int) -> None:
        """A producer begins anew; its earlier self is refused from the first batch on."""
        self.run()
        keys = [key for key, batches in self.batches.items() if batches and key[1].sure]
        if keys:
            key = keys[which % len(keys)]
            before = self.batches[key]
            self.loose += before
            self.epochs[key] += 1
            fresh = Sent(before[0].spot, Producer(key[0], self.epochs[key], 0), self.values(2))
            self.batches[key] = [fresh]
            self.send(fresh)
            self.run()
            if self.batches.get(key) and fresh.base is not None:
                body = self.bench.batch(before[0].values, before[0].producer).data
                answer = self.answered(Publish(key[1].name, key[2]), body)
                assert self.in_trouble(answer) or isinstance(answer, ProducerFenced)

    @rule(
        which=ANY,
        stages=st.lists(st.tuples(ANY, st.booleans()), max_size=4),
        then=st.sampled_from(["nothing", "abort", "begin", "commit", "commit", "commit"]),
        some=st.booleans(),
        move=st.none() | st.tuples(ANY, st.floats(0, 1)),
        shared=st.booleans(),
        answered=st.booleans(),
    )
    def transact(
        self,
        which: int,
        stages: list[tuple[int, bool]],
        then: str,
        some: bool,
        move: tuple[int, float] | None,
        shared: bool,
        answered: bool,
    ) -> None:
        """Begin a transaction, or go on with an open one; and perhaps end it."""
        name = TRANSACTIONS[which % 2]
        if name not in self.open:
            self.begin_transaction(name, shared)
        for topic, large in stages:
            self.stage(name, self.spot(topic), self.values(5 if large else 1))
        one = self.open.get(name)
        if one is not None and one.outcome == "open":
            if then == "abort":
                self.end(one, "gone")
                self.ask(TransactionAbort(name, one.epoch), lambda _: None)
            elif then == "begin":
                self.begin_transaction(name, shared)
            elif then == "commit":
                self.commit(one, some, move)
        if answered:
            self.run()

    @precondition(lambda self: any(one.outcome == "asked" for one in self.open.values()))
    @rule(which=ANY)
    def try_to_commit_again(self, which: int) -> None:
        """The disk was full: nothing has happened, and the commit can be asked for again."""
        self.run()
        one = self.open.get(TRANSACTIONS[which % 2])
        if one is not None and one.outcome == "asked" and not self.failed:
            spots = [spot for spot, _ in one.stages.values()] + ([one.move[1]] if one.move is not None else [])
            if all(self.topics.get(topic.name) is topic for topic, _ in spots):
                self.ask_to_commit(one)
                self.run()

    @precondition(lambda self: any(one.outcome == "committed" for one in self.transactions))
    @rule(which=ANY)
    def repeat_a_commit(self, which: int) -> None:
        """The last commit of a name, asked for once more, changes nothing."""
        self.run()
        name = TRANSACTIONS[which % 2]
        done = [one for one in self.transactions if one.name == name and one.outcome in ("asked", "committed")]
        if done and done[-1].outcome == "committed":
            answer = self.answered(TransactionCommit(name, done[-1].epoch))
            assert self.in_trouble(answer) or answer.repeated
            answer = self.answered(TransactionBegin(name, done[-1].sequence))
            assert self.in_trouble(answer) or answer.committed

    @rule(topic=ANY, share=st.floats(0, 1), answered=st.booleans())
    def move_a_group(self, topic: int, share: float, answered: bool) -> None:
        spot = self.known(topic)
        if not spot:
            return
        offset = self.offset_in(spot, share)
        moves = self.moves("readers", spot)
        moves.append((offset, None))

        def moved(_: object) -> None:
            del moves[: moves.index((offset, None))]

        self.ask(Commit("readers", [PartitionOffset(spot[0].name, spot[1], offset)]), moved)
        if answered:
            self.run()

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 200.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.run()
        if seconds > 100:
            for one in list(self.open.values()):
                if one.outcome == "open" or not self.failed:
                    self.end(one, "gone")  # the disk was full, if it was asked to commit
        self.attempt(lambda: self.bench.tick(seconds))
        self.run()

    @rule(
        slow=st.booleans(),
        room=st.none() | st.integers(0, 3000),
        armed=st.none() | st.integers(1, 30),
        failing=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def change_the_disk(self, slow: bool, room: int | None, armed: int | None, failing: int) -> None:
        """Syncs take their time; the disk is nearly full; syncs will fail; the power will go at some operation."""
        if failing:
            self.disk.fail_sync(failing)
            self.failed = True
        self.slow = self.bench.syncing_later = slow
        if self.disk.capacity_bytes is not None:
            self.run()
            self.disk.capacity_bytes = None
            self.attempt(lambda: self.bench.tick(1.0))
            self.run()
        elif room is not None:
            self.disk.capacity_bytes = self.disk.used_bytes + room
        if armed is not None:
            self.disk.crash_after(armed)

    @rule(how=st.sampled_from(["restart", "kill", "lost", "random"]), again=st.none() | st.integers(1, 40))
    def end_the_broker(self, how: str, again: int | None) -> None:
        """In an orderly way; by a death, after which all that was written stays; or by a power loss, perhaps two."""
        self.mend_the_disk()
        if how in ("restart", "kill"):
            if how == "kill" or self.failed or self.attempt(self.stop):
                self.recover(power_lost=False)
            return
        self.disk.power_loss(Unsynced(how))
        if again is not None:
            self.disk.crash_after(again)
            try:
                self.start()
                self.disk.crash_after(0)
            except (PowerLoss, LogFailed):
                assert self.disk.crashed
            note(f"power lost again after {again} operations")
            self.disk.power_loss(Unsynced(how))
        self.recover(power_lost=True)

    def stop(self) -> bool:
        self.bench.tick()
        self.bench.close()
        return True


BrokerOnAFaultyDisk.TestCase.settings = settings(
    max_examples=int(os.environ.get("HEADRACE_MODEL_EXAMPLES", "100")), stateful_step_count=50
)
test_broker_on_a_faulty_disk = BrokerOnAFaultyDisk.TestCase
