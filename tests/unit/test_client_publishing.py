"""How single messages come into batches, against a broker in this process."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.model.errors import Closed, MessageTooLarge, PartitionNotFound
from headrace.model.limits import MESSAGE_BYTES_MAX
from headrace.server import EmbeddedServer


def test_producers_begin_with_different_partitions(tmp_path: Path) -> None:
    with headrace.open(tmp_path) as bus:
        bus.create_topic("wide", partitions=64)
        used = set()
        for _ in range(12):
            with bus.producer("wide") as producer:
                used.add(producer.publish(b"x").partition)
    assert len(used) > 1


def test_partitions_take_turns(tmp_path: Path) -> None:
    with headrace.open(tmp_path) as bus:
        bus.create_topic("t", partitions=3)
        used = [bus.publish("t", b"x").partition for _ in range(6)]
    assert used[:3] == used[3:]
    assert set(used) == {0, 1, 2}


def batches_of(tmp_path: Path, count: int, batch_count: int) -> list[int]:
    """How many messages the batches have when so many are published at the same time, after a first one."""

    async def published() -> list[int]:
        batches: list[headrace.Receipt] = []
        async with await headrace.open_async(tmp_path) as bus:
            await bus.create_topic("t")
            async with bus.producer("t", batch_count=batch_count, after_ack=[batches.append]) as producer:
                await producer.publish(b"first")
                receipts = await asyncio.gather(*(producer.publish(b"v") for _ in range(count)))
        assert [(receipt.offset, receipt.count) for receipt in receipts] == [(1 + at, 1) for at in range(count)]
        return [batch.count for batch in batches]

    return asyncio.run(published())


def test_what_is_published_at_the_same_time_shares_a_batch(tmp_path: Path) -> None:
    assert batches_of(tmp_path, 10, batch_count=100) == [1, 10]


def test_a_full_batch_goes_at_once(tmp_path: Path) -> None:
    assert batches_of(tmp_path, 8, batch_count=3) == [1, 3, 3, 2]


def test_messages_with_and_without_keys_keep_their_order(tmp_path: Path) -> None:
    async def published() -> list[int]:
        async with await headrace.open_async(tmp_path) as bus:
            await bus.create_topic("t")
            keys = [None, b"a", None, None, b"b", None]
            receipts = await asyncio.gather(*(bus.publish("t", b"v", key=key) for key in keys))
            return [receipt.offset for receipt in receipts]

    assert asyncio.run(published()) == list(range(6))


def test_one_who_stops_waiting_takes_nobody_along(tmp_path: Path) -> None:
    async def published() -> list[object]:
        async with await headrace.open_async(tmp_path) as bus:
            await bus.create_topic("t")
            waiting = [asyncio.ensure_future(bus.publish("t", b"v")) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[1].cancel()
            return await asyncio.gather(*waiting, return_exceptions=True)

    first, cancelled, last = asyncio.run(published())
    assert isinstance(first, headrace.Receipt)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(last, headrace.Receipt)


def test_a_message_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with headrace.open(tmp_path) as bus:
        bus.create_topic("t", message_bytes_max=10)
        with pytest.raises(MessageTooLarge):
            bus.publish("t", bytes(11))
        assert bus.publish("t", bytes(10)).offset == 0


def _publish_in_transaction(bus: headrace.Bus, *values: bytes) -> None:
    with bus.transaction("t") as transaction:
        transaction.publish("t", values[0])
        transaction.publish_many("t", list(values))


PUBLISHING: dict[str, Callable[[headrace.Bus, headrace.Producer, bytes], Any]] = {
    "publish": lambda bus, _, value: bus.publish("t", value),
    "publish with a key": lambda bus, _, value: bus.publish("t", value[1:], key="k"),
    "publish_many": lambda bus, _, value: bus.publish_many("t", [b"x", value]),
    "publish_many with keys": lambda bus, _, value: bus.publish_many("t", [b"x", value[1:]], keys=["a", "b"]),
    "send": lambda _, producer, value: producer.send(value).result(),
    "send_many": lambda _, producer, value: producer.send_many([value]).result(),
    "a transaction": lambda bus, _, value: _publish_in_transaction(bus, value),
}


@pytest.mark.parametrize("way", PUBLISHING)
def test_a_limit_that_was_raised_elsewhere_counts_at_once(tmp_path: Path, way: str) -> None:
    server = EmbeddedServer(tmp_path, unix_socket=f"{tmp_path}/s", host="")
    address = f"headrace+unix://{tmp_path}/s"
    try:
        with headrace.connect(address) as bus, headrace.connect(address) as other, bus.producer("t") as producer:
            other.create_topic("t", message_bytes_max=10)
            bus.publish("t", b"known")
            producer.send(b"known", key="too")
            with pytest.raises(MessageTooLarge) as refused:
                PUBLISHING[way](bus, producer, bytes(11))
            assert "11 bytes" in str(refused.value)
            assert "takes 10 at most" in str(refused.value)
            assert "`headrace topic alter t --message-bytes-max 11`" in str(refused.value)
            other.alter_topic("t", message_bytes_max=11)
            PUBLISHING[way](bus, producer, bytes(11))
            with pytest.raises(MessageTooLarge, match="divide it"):
                PUBLISHING[way](bus, producer, bytes(MESSAGE_BYTES_MAX + 1))
    finally:
        server.close()


def test_partitions_that_were_added_elsewhere_can_be_used_at_once(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, unix_socket=f"{tmp_path}/s", host="")
    address = f"headrace+unix://{tmp_path}/s"
    try:
        with headrace.connect(address) as bus, headrace.connect(address) as other:
            bus.publish("t", b"known")
            for partition in range(1, 4):
                other.alter_topic("t", partitions=partition + 1)
                if partition == 1:
                    assert bus.publish("t", b"x", partition=partition).partition == partition
                elif partition == 2:
                    assert bus.publish_many("t", [b"x"], partition=partition)[0].partition == partition
                else:
                    with bus.transaction("t") as transaction:
                        transaction.publish("t", b"x", partition=partition)
                with pytest.raises(PartitionNotFound):
                    bus.publish("t", b"x", partition=partition + 1)
            assert other.offsets("t") == {0: 1, 1: 1, 2: 1, 3: 1}
    finally:
        server.close()


def test_a_message_is_refused_as_too_large_also_without_a_broker(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, unix_socket=f"{tmp_path}/s", host="")
    with headrace.connect(f"headrace+unix://{tmp_path}/s", timeout=0.2) as bus:
        bus.create_topic("t", message_bytes_max=10)
        bus.publish("t", b"known")
        server.close()
        with pytest.raises(MessageTooLarge):
            bus.publish("t", bytes(11))


def test_what_had_to_wait_for_an_answer_is_sent_at_once() -> None:
    """The last of it goes out when an answer makes room, and not with the next heartbeat."""
    with headrace.open(":memory:") as bus:
        for _ in range(20):
            with bus.producer("orders", batch_count=1) as producer:
                producer.send_many([b"order"] * 300)
                producer.flush(timeout=4)
        assert bus.offsets("orders", at="latest") == {0: 6000}


def test_a_message_that_is_sent_while_the_producer_closes_gets_an_outcome() -> None:
    with headrace.open(":memory:") as bus:
        late: list[headrace.Sent] = []
        tried = threading.Event()

        def send_another(_receipt: headrace.Receipt) -> None:
            with contextlib.suppress(Closed):  # if close was quicker
                late.append(producer.send(b"late"))
            tried.set()

        producer = bus.producer("t", linger=60, after_ack=[send_another])
        producer.send(b"first")
        producer.close(20)
        assert tried.wait(20)
        for sent in late:
            with contextlib.suppress(Closed):
                sent.result(20)


def test_every_way_to_publish_counts_the_same_bytes(tmp_path: Path) -> None:
    headers, limit = {"größe": b"text"}, 16  # 7 bytes of UTF-8 and 4 of text
    fits, large = b"v" * 2, b"v" * 3
    with headrace.open(tmp_path) as bus, headrace.Log(":memory:") as log:
        bus.create_topic("t", message_bytes_max=limit)
        with bus.producer("t") as producer, bus.transaction("x") as transaction:
            ways: list[Callable[[bytes], object]] = [
                lambda value: producer.send(value, b"key", headers=headers),
                lambda value: producer.publish(value, b"key", headers=headers),
                lambda value: producer.send_many([b"", value], [b"", b"key"], headers=[None, headers]),
                lambda value: transaction.publish("t", value, key=b"key", headers=headers),
                lambda value: transaction.publish_many("t", [value], keys=[b"key"], headers=[headers]),
            ]
            for publish in ways:
                publish(fits)
                with pytest.raises(MessageTooLarge, match="has 17 bytes"):
                    publish(large)
        with pytest.raises(MessageTooLarge, match=f"has {MESSAGE_BYTES_MAX + 1} bytes"):
            log.append(b"v" * (MESSAGE_BYTES_MAX - 13), b"key", headers=headers)
