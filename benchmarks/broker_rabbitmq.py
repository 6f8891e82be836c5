"""RabbitMQ: the server, and a classic queue with pika."""

import functools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import installing
from headrace.bench.brokers import Contestant, PublishPace, Take
from headrace.bench.measure import Unavailable, WrongResult, check
from headrace.bench.receiver import Arrived, Receive
from headrace.bench.servers import HOST, ServerNode, answers, free_port

_PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"
"""The wrapper in the path runs as another user, in the system's own directories."""
_AMQP, _METHOD = b"AMQP\x00\x00\x09\x01", b"\x01\x00\x00"
"""What a client says first, and how the server's answer begins."""


class RabbitNode(ServerNode):
    """One RabbitMQ server, with the Erlang name server that it needs."""

    port = stream_port = http_port = 0

    def __init__(self, *, streams: bool = True, management: bool = False) -> None:
        super().__init__()
        self._streams = streams
        self._management = management
        """Whether it serves its management API over HTTP."""

    def find(self) -> None:
        """Make sure of the server and the clients."""
        installing.debian_program("rabbitmq-server", "rabbitmq-server")
        if not Path(_PROGRAM).exists():
            raise Unavailable(f"there is no {_PROGRAM}")
        installing.need("pika", "pika")
        if self._streams:
            installing.wheel("rstream", "rstream")

    def _start(self, place: str, *, synced: bool) -> None:
        del synced  # A confirmed message always is; a stream's never.
        self.port, self.stream_port = free_port(), free_port()
        names = str(free_port())
        common = {"HOME": place, "ERL_EPMD_PORT": names, "ERL_EPMD_ADDRESS": HOST}
        epmd = shutil.which("epmd") or "epmd"
        # Started here, as the server would leave one behind.
        self._launch([epmd, "-port", names], place, lambda: answers(int(names), b"\x00\x01n", b""), common)
        settings = [f"stream.listeners.tcp.1 = {HOST}:{self.stream_port}", f"stream.advertised_host = {HOST}"]
        settings += [f"stream.advertised_port = {self.stream_port}", ""]
        settings = settings if self._streams else [""]
        plugins = ["rabbitmq_stream"] if self._streams else []
        if self._management:
            self.http_port = free_port()
            settings = [f"management.tcp.ip = {HOST}", f"management.tcp.port = {self.http_port}", *settings]
            plugins.append("rabbitmq_management")
        (Path(place) / "rabbitmq.conf").write_text("\n".join(settings), encoding="utf-8")
        (Path(place) / "plugins").write_text(f"[{','.join(plugins)}].\n", encoding="utf-8")
        self._launch([_PROGRAM], place, self._ready, {**common, **self._environment(place)})

    def _environment(self, place: str) -> dict[str, str]:
        return {
            "RABBITMQ_NODENAME": f"bench{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": f"{place}/mnesia",
            "RABBITMQ_LOG_BASE": f"{place}/log",
            "RABBITMQ_GENERATED_CONFIG_DIR": f"{place}/generated",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{place}/plugins",
            "RABBITMQ_CONFIG_FILE": f"{place}/rabbitmq.conf",
            "RABBITMQ_CONF_ENV_FILE": f"{place}/none",
            "RABBITMQ_PID_FILE": f"{place}/pid",
        }

    def _ready(self) -> bool:
        if self._streams and not answers(self.stream_port, b"", b""):
            return False
        if self._management and not answers(self.http_port, b"GET / HTTP/1.0\r\n\r\n", b"HTTP"):
            return False
        return answers(self.port, _AMQP, _METHOD)


_SYNCED = "persistent messages in a durable classic queue, confirmed once they are synced (in groups)"


class RabbitMQ(Contestant):
    """A classic queue."""

    name = "rabbitmq"
    keeps_consumed = False
    words: ClassVar[Mapping[bool, str]] = {
        False: f"synced, for it has nothing in between: {_SYNCED}",
        True: f"synced: {_SYNCED}; consumers may get them before that",
    }
    api: ClassVar[Mapping[str, str]] = {
        "publish": "pika SelectConnection, basic_publish with publisher confirms, not waiting for one before the next",
        "consume": "pika SelectConnection, basic_consume with auto_ack, a callback a message",
        "latency": "pika BlockingConnection, basic_publish not waiting for confirms; basic_consume in another process",
    }
    node: RabbitNode

    def create(self, topic: str) -> None:
        """Make a queue."""
        self._do(lambda channel: channel.queue_declare(topic, durable=True))

    def delete(self, topic: str) -> None:
        """Drop a queue."""
        self._do(lambda channel: channel.queue_delete(topic))

    def _do(self, work: Callable[[Any], Any]) -> None:
        connection = blocking(self.node.port)
        work(connection.channel())
        connection.close()

    def publish(self, topic: str, batches: Iterable[list[bytes]]) -> float:
        """Batch after batch into the socket; confirms come meanwhile."""
        return _Publishing(self.node.port, topic, iter(batches)).run()

    def consume(self, topic: str, count: int, take: Take) -> float:
        """Messages pushed by the server."""
        return _Consuming(self.node.port, topic, count, take).run()

    def publish_paced(self, topic: str, values: Iterable[bytes], pace: PublishPace) -> list[int]:
        """One after the other."""
        import pika

        connection = blocking(self.node.port)
        channel = connection.channel()
        persistent = pika.BasicProperties(delivery_mode=2)
        begun = []
        for value in values:
            begun.append(pace.wait())
            channel.basic_publish("", topic, value, persistent)
        connection.close()
        return begun

    def receive(self) -> Receive:
        """Messages pushed by the server."""
        return functools.partial(_receive, self.node.port)


def blocking(port: int) -> Any:
    """A connection that waits for its answers."""
    import pika

    return pika.BlockingConnection(pika.ConnectionParameters(HOST, port))


class _Talking:
    """One connection with one channel, until the work is done."""

    def __init__(self, port: int) -> None:
        import pika

        self._seconds = 0.0
        self._begin = 0.0
        self._error: object = None
        self._channel: Any = None
        self._connection = pika.SelectConnection(
            pika.ConnectionParameters(HOST, port),
            on_open_callback=lambda opened: opened.channel(on_open_callback=self._opened),
            on_open_error_callback=self._closed,
            on_close_callback=self._closed,
        )

    def run(self) -> float:
        self._connection.ioloop.start()
        if not self._seconds:
            raise WrongResult(f"the connection was lost: {self._error}")
        return self._seconds

    def _opened(self, channel: Any) -> None:
        self._channel = channel
        self.go()

    def go(self) -> None:
        raise NotImplementedError

    def started(self) -> None:
        self._begin = time.perf_counter()

    def finished(self) -> None:
        self._seconds = time.perf_counter() - self._begin
        self._connection.close()

    def _closed(self, _: Any, error: object) -> None:
        self._error = error
        self._connection.ioloop.stop()


class _Publishing(_Talking):
    def __init__(self, port: int, topic: str, batches: Iterator[list[bytes]]) -> None:
        super().__init__(port)
        import pika

        self._topic = topic
        self._batches = batches
        self._persistent = pika.BasicProperties(delivery_mode=2)
        self._sent = self._confirmed_below = 0
        self._confirmed: set[int] = set()
        """Those above the one that it and all below were confirmed with."""
        self._all_sent = False

    def go(self) -> None:
        self._channel.confirm_delivery(self._on_confirm, callback=lambda _: self._start())

    def _start(self) -> None:
        self.started()
        self._send()

    def _send(self) -> None:
        values = next(self._batches, None)
        if values is None:
            self._all_sent = True
            self._look()
            return
        for value in values:
            self._channel.basic_publish("", self._topic, value, self._persistent)
        self._sent += len(values)
        self._connection.ioloop.call_later(0, self._send)

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        check(method.NAME == "Basic.Ack", "a message was refused")
        if method.multiple:
            self._confirmed_below = method.delivery_tag
            self._confirmed = {tag for tag in self._confirmed if tag > method.delivery_tag}
        else:
            self._confirmed.add(method.delivery_tag)
        self._look()

    def _look(self) -> None:
        if self._all_sent and self._confirmed_below + len(self._confirmed) == self._sent:
            self.finished()


class _Consuming(_Talking):
    def __init__(self, port: int, topic: str, count: int, take: Take) -> None:
        super().__init__(port)
        self._topic = topic
        self._count = count
        self._take = take
        self._seen = 0
        self._values: list[bytes] = []

    def go(self) -> None:
        self.started()
        self._channel.basic_consume(self._topic, self._on_message, auto_ack=True)

    def _on_message(self, _: Any, __: Any, ___: Any, body: bytes) -> None:
        self._values.append(body)
        self._seen += 1
        if len(self._values) == 1000 or self._seen == self._count:
            self._take(self._values)
            self._values = []
            if self._seen == self._count:
                self.finished()


def _receive(port: int, topic: str, count: int, ready: Callable[[], None]) -> Arrived:
    connection = blocking(port)
    channel = connection.channel()
    arrived = Arrived(times := [], values := [])

    def on_message(_: Any, __: Any, ___: Any, body: bytes) -> None:
        times.append(time.monotonic_ns())
        values.append(body)
        if len(values) == count:
            channel.stop_consuming()

    channel.basic_consume(topic, on_message, auto_ack=True)
    ready()
    channel.start_consuming()
    connection.close()
    return arrived
