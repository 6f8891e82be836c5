"""A gateway that speaks lines of text, written as coroutines; `text://HOST:PORT` names it.

PUBLISH topic value          OK offset
FETCH topic offset           MESSAGE offset value, for each there is, then END
STREAM topic offset          the same for all that come, until the client sends a line
LEASE topic wait_ms          LEASED lease partition offset value, or NONE
ACK topic lease partition offset   OK
anything else                ERROR code text
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.gateways.addresses import ListenAddress, tcp_url
from headrace.gateways.authentication import ANONYMOUS_MECHANISM, Peer
from headrace.gateways.gateway import GatewayContext, GatewayStatistics
from headrace.model.batch import Batch, Columns, encode, parse
from headrace.model.errors import Draining, HeadraceError, InvalidArgument
from headrace.model.leasing import Ack, Holding, Lease
from headrace.model.reading import Fetch, StreamOpen
from headrace.model.request import Request
from headrace.model.requests import Publish

READ_BYTES = 1 << 20
CREDIT_BYTES = 1 << 60


class TextGateway:
    """All connections of the text protocol to one broker."""

    api = 1

    def __init__(self, context: GatewayContext, addresses: Sequence[ListenAddress]) -> None:
        self.context = context
        self.draining = False
        self._addresses = addresses
        self._servers: list[asyncio.Server] = []
        self._connections: dict[TextConnection, asyncio.Task[None] | None] = {}

    @property
    def busy(self) -> bool:
        return any(connection.asking for connection in self._connections)

    async def start(self) -> list[str]:
        for address in self._addresses:
            if address.port is None:
                raise InvalidArgument(f"cannot listen on {address}: give a port")
            self._servers.append(await asyncio.start_server(self._serve, address.host, address.port))
        bound = [sock.getsockname() for server in self._servers for sock in server.sockets]
        return [tcp_url("text", host, port) for host, port, *_ in bound]

    def stop_accepting(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    def drain(self) -> None:
        self.draining = True
        for connection in self._connections:
            connection.say("DRAINING")

    def ignore_requests(self) -> None:
        for connection in self._connections:
            connection.ignoring = True

    def close(self) -> None:
        self.stop_accepting()
        for connection, task in self._connections.items():
            connection.writer.close()
            if task is not None:
                task.cancel()

    def abort(self) -> None:
        for connection in self._connections:
            connection.writer.transport.abort()

    def statistics(self) -> GatewayStatistics:
        return GatewayStatistics(len(self._connections), max((each.heard_us for each in self._connections), default=0))

    def descriptors(self) -> list[int]:
        sockets = [sock for server in self._servers for sock in server.sockets]
        sockets += [connection.writer.get_extra_info("socket") for connection in self._connections]
        return [sock.fileno() for sock in sockets]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = TextConnection(self, reader, writer)
        refusal = self.context.limit.admit()
        if refusal is not None:
            connection.fail(refusal)
            writer.close()
            return
        self._connections[connection] = asyncio.current_task()
        try:
            await connection.serve()
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client is gone, or the server stops
        finally:
            del self._connections[connection]
            self.context.limit.release()
            writer.close()


class TextConnection:
    """A client's connection."""

    def __init__(self, gateway: TextGateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.asking = self.ignoring = False
        self.now_us = gateway.context.runtime.now_us
        self.heard_us = self.now_us()
        self._gateway = gateway
        self._broker = gateway.context.broker
        self._reader = reader

    def say(self, *words: object) -> None:
        self.writer.write(" ".join(map(str, words)).encode() + b"\n")

    def fail(self, error: HeadraceError) -> None:
        self.say("ERROR", error.code, str(error).replace("\n", " "))

    async def serve(self) -> None:
        host, port, *_ = self.writer.get_extra_info("peername")
        peer = Peer("text", f"{host}:{port}")
        try:
            if self._gateway.draining:
                raise Draining
            identity = self._gateway.context.authenticate(ANONYMOUS_MECHANISM, b"", peer)
            if isinstance(identity, PendingAnswer):
                identity = await identity
        except HeadraceError as error:
            self.fail(error)
            return
        self.session = self._broker.connect(
            lambda _: None,
            f"text at {peer.address}",
            self.now_us(),
            identity=identity,
            address=peer.address,
            gateway=peer.gateway,
        )
        try:
            while line := await self._reader.readline():
                self.heard_us = self.now_us()
                if not self.ignoring:
                    await self._answer(line.decode().split())
        finally:
            self._broker.disconnect(self.session, self.now_us())

    async def _answer(self, words: list[str]) -> None:
        verbs: dict[str, Any] = {
            "PUBLISH": self._publish,
            "FETCH": self._fetch,
            "STREAM": self._stream,
            "LEASE": self._lease,
            "ACK": self._ack,
        }
        try:
            await verbs[words[0]](*words[1:])
        except HeadraceError as error:
            self.fail(error)
        except (KeyError, IndexError, TypeError, ValueError):
            self.fail(InvalidArgument("unknown command"))
        await self.writer.drain()

    async def _ask(self, request: Request[Any], body: bytes | bytearray = b"") -> Any:
        self.asking = True
        try:
            answer = self._broker.ask(self.session, request, memoryview(bytearray(body)), self.now_us())
            return await answer if isinstance(answer, PendingAnswer) else answer
        finally:
            self.asking = False

    async def _publish(self, topic: str, value: str) -> None:
        batch = encode(Columns([value.encode()]), self.now_us())
        self.say("OK", (await self._ask(Publish(topic, 0), batch.data)).base_offset)

    async def _fetch(self, topic: str, offset: str) -> None:
        self._send_batches((await self._ask(Fetch(topic, 0, int(offset)))).body)
        self.say("END")

    async def _stream(self, topic: str, offset: str) -> None:
        ready = asyncio.Event()
        stream = await self._ask(StreamOpen(topic, 0, int(offset), CREDIT_BYTES))
        stream.start(ready.set)
        stopped = asyncio.ensure_future(self._reader.readline())
        try:
            while not stopped.done():
                ready.clear()
                while (found := stream.read(READ_BYTES, self.now_us())) is not None:
                    self._send_batches(found.view)
                await self.writer.drain()
                waiting = asyncio.ensure_future(ready.wait())
                await asyncio.wait([stopped, waiting], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
        finally:
            stopped.cancel()
            stream.close()
        self.say("END")

    def _send_batches(self, body: bytes | memoryview) -> None:
        for batch in _batches(memoryview(body)):
            for number, value in enumerate(batch.columns().values):
                self.say("MESSAGE", batch.base_offset + number, (value or b"").decode())

    async def _lease(self, topic: str, wait_ms: str) -> None:
        answer = await self._ask(Lease(topic, wait_ms=int(wait_ms)))
        if not isinstance(answer, AnswerWithBody):
            self.say("NONE")
            return
        (portion,) = answer.answer.portions
        (batch,) = _batches(memoryview(answer.body))
        (value,) = batch.columns().values
        self.say("LEASED", portion.lease, portion.partition, portion.offsets[0], value.decode())

    async def _ack(self, topic: str, lease: str, partition: str, offset: str) -> None:
        await self._ask(Ack(topic, holdings=[Holding(int(partition), int(lease), [int(offset)])]))
        self.say("OK")


def _batches(view: memoryview) -> Iterator[Batch]:
    position = 0
    while position < len(view):
        batch = parse(view, position)
        position += batch.length
        yield batch
