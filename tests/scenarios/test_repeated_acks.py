"""Acknowledgements that a client repeats, over connections that break before and after the broker got them."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headrace
from headrace.server import EmbeddedServer

PATIENCE_S = 60.0


@pytest.fixture
def directory() -> Iterator[Path]:
    """Where a broker listens on the socket `s`; its topic `jobs` has a message."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as found:
        server = EmbeddedServer(f"{found}/data", host="", unix_socket=f"{found}/s")
        try:
            with headrace.connect(f"headrace+unix://{found}/s") as bus:
                bus.publish("jobs", b"first")
            yield Path(found)
        finally:
            server.close()


class Relay:
    """Between a client and a broker: what the test refuses, withholds and cuts."""

    def __init__(self, broker: Path) -> None:
        self.refuses = False
        self.refused = 0
        self.withholds = False
        """Whether of each connection only the answer to its handshake arrives."""
        self._broker = broker
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection."""
        if self.refuses:
            self.refused += 1
            writer.transport.abort()
            return
        from_broker, to_broker = await asyncio.open_unix_connection(self._broker)
        self._writers += [writer, to_broker]
        await asyncio.gather(self._forward(reader, to_broker), self._forward(from_broker, writer, answers=True))

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool = False
    ) -> None:
        try:
            writer.write(await reader.read(1 << 16))
            while data := await reader.read(1 << 16):
                if not (answers and self.withholds):
                    writer.write(data)
        except ConnectionError:
            pass  # it was cut
        finally:
            writer.close()

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)


def test_an_ack_whose_answer_is_lost_after_a_reconnect_counts_as_done(directory: Path) -> None:
    async def story(other: headrace.Bus) -> None:
        relay = Relay(directory / "s")
        server = await asyncio.start_unix_server(relay.serve, directory / "relay")
        async with server, await headrace.connect_async(f"headrace+unix://{directory}/relay") as bus:
            queue = bus.queue("jobs")
            (job,) = await queue.lease()
            relay.refuses = True
            relay.cut()
            await eventually(lambda: relay.refused > 0)
            acking = asyncio.create_task(queue.ack(job))
            relay.refuses, relay.withholds = False, True
            await eventually(lambda: other.queue("jobs").stats().acked == 1)
            assert not acking.done()
            relay.withholds = False
            relay.cut()
            await asyncio.wait_for(acking, PATIENCE_S)

    with headrace.connect(f"headrace+unix://{directory}/s") as other:
        asyncio.run(story(other))
