"""Nodes among themselves: a follower's connection to the owner, and what the owner remembers of its followers."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.client._async.connection.connection import Connection, receive_memory
from headrace.client.connection.addresses import Address, parse_address, with_tls
from headrace.client.connection.clock import Clock
from headrace.client.connection.tls_options import TlsOptions
from headrace.client.connection.token_source import NO_TOKEN, TokenSource
from headrace.cluster.claims import ANSWER_US, FollowerReport, OwnerConnection
from headrace.cluster.node_record import BLOCKED, RESTORING
from headrace.model.cluster_requests import NodeReport, OwnerReport
from headrace.model.errors import (
    ConnectionFailed,
    Forbidden,
    HeadraceError,
    InvalidArgument,
    NotAuthenticated,
    NotServing,
    TlsFailed,
)
from headrace.storage.replicated.keys import Position
from headrace.wire.native import Hello

logger = logging.getLogger("headrace.cluster")

REPORT_S = 0.5
"""How often a follower reports to the owner."""
_REFUSED_S = 5.0
"""The pause after the owner has refused this node."""
_CONNECT_S = 1.0
_RETRY_S = 0.2
_NATIVE = ("headrace", "headraces")
_SAMPLES_MAX = 600


class PeerOptions(NamedTuple):
    """How this node connects to others."""

    node: str
    version: str
    token: TokenSource = NO_TOKEN
    tls: TlsOptions = TlsOptions()


class OwnerLink:
    """The connection of a follower to the owner of its shard, over which it reports twice a second."""

    def __init__(
        self,
        options: PeerOptions,
        make_report: Callable[[], NodeReport],
        now_us: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        """Nothing is connected before `follow`; `changed` is called when something is new that decisions depend on."""
        self._options = options
        self._make_report = make_report
        self._now_us = now_us
        self._changed = changed
        self._memory = receive_memory()
        self._task: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._epoch = 0
        self._addresses: tuple[str, ...] = ()
        self.state = OwnerConnection.NONE
        self.answered_us = 0
        """When the owner of the epoch last answered."""
        self.answer: OwnerReport | None = None
        """What it answered."""
        self._told = ""
        self._refused = ""

    @property
    def is_open(self) -> bool:
        """Whether the owner answers."""
        return self.state is OwnerConnection.OPEN

    def follow(self, epoch: int, addresses: Sequence[str]) -> None:
        """Connect to the owner of an epoch, or stay connected to it."""
        if (epoch, tuple(addresses)) == (self._epoch, self._addresses) and self._task is not None:
            return
        self.stop()
        self._epoch, self._addresses = epoch, tuple(addresses)
        self.state, self.answered_us, self.answer = OwnerConnection.NONE, 0, None
        if addresses:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Close the connection, and make no other."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self.state = OwnerConnection.NONE
        self._epoch = 0

    async def _run(self) -> None:
        while True:
            try:
                connection = await self._connect()
                began_us = self._now_us()
                await self._talk(connection)
                if self._now_us() - began_us > _RETRY_S * 1e6:
                    continue  # at once: a machine whose process is dead refuses
            except NotServing as error:
                self._tell("node does not serve", error)
                self._set(OwnerConnection.NONE)
            except (NotAuthenticated, Forbidden, TlsFailed) as error:
                self._tell_refused(error)
                self._set(OwnerConnection.NONE)
                await asyncio.sleep(_REFUSED_S)
            except (ConnectionFailed, HeadraceError) as error:
                self._tell("owner cannot be reached", error)
                gone = self.answered_us and is_refused(error)
                self._set(OwnerConnection.REFUSED if gone else OwnerConnection.NONE)
            await asyncio.sleep(_RETRY_S)

    async def _connect(self) -> Connection:
        """Connect to the first address that answers; raises the last error, a refusal only if all refused."""
        failures: list[HeadraceError] = []
        for url in self._addresses:
            try:
                target = self._target(url)
                hello = Hello(client=f"headrace/{self._options.version}", name=f"node {self._options.node}")
                greeting = self._options.token.greeting(hello)
                self._lost.clear()
                return await Connection.open(target, greeting, _CONNECT_S, self._on_lost, self._memory, Clock())
            except NotServing:
                raise
            except HeadraceError as error:
                failures.append(error)
        raise next((one for one in failures if not is_refused(one)), failures[-1])

    def _target(self, url: str) -> Address:
        address = parse_address(url)
        if address.scheme not in _NATIVE:
            raise InvalidArgument(f"{url} is no address of the native protocol")
        return with_tls(address, self._options.tls) if address.has_tls else address

    async def _talk(self, connection: Connection) -> None:
        """Report until the connection breaks."""
        try:
            while not connection.closed:
                report = self._make_report()
                self.answer, _ = await connection.request(report, b"", ANSWER_US / 1e6)
                if self.answer.epoch == self._epoch:
                    self.answered_us = self._now_us()
                    self._told = self._refused = ""
                    self._set(OwnerConnection.OPEN, always=True)
                await wait_for_event(self._lost, REPORT_S)
        except ConnectionFailed:
            pass  # the next attempt to connect tells whether the process is dead
        finally:
            self.state = OwnerConnection.NONE
            connection.end()
        self._changed()  # the owner may have released the shard

    def _on_lost(self, _: Connection, __: HeadraceError) -> None:
        self._lost.set()

    def _set(self, state: OwnerConnection, *, always: bool = False) -> None:
        is_new = state is not self.state
        self.state = state
        if is_new or always:
            self._changed()

    def _tell(self, event: str, error: HeadraceError) -> None:
        """Log a failure once."""
        text = f"{event}: {error}"
        if text != self._told:
            self._told = text
            reason = str(error).partition("; is it running")[0]  # nobody has to start what another node replaces
            logger.info("%s  epoch=%d reason=%s", event, self._epoch, reason)

    def _tell_refused(self, error: HeadraceError) -> None:
        """Log once that the owner does not let this node in: it goes on following by the store alone."""
        if self._refused != str(error):
            self._refused = str(error)
            logger.error(
                "owner refuses this node, or is not trusted; check --node-token-file, --node-certificate, --node-ca, "
                "and that its identity has the role `node`  epoch=%d reason=%s",
                self._epoch,
                error,
            )


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until an event is set, or for so long. Unlike asyncio's wait_for it never swallows a cancellation."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass


def is_refused(error: BaseException) -> bool:
    """Whether a machine answered, and nothing listens there."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return True
        if isinstance(cause, OSError) and cause.errno is None and "Multiple exceptions" in str(cause):
            return str(cause).count("[Errno") == str(cause).count("[Errno 111]") + str(cause).count("[Errno 61]")
        cause = cause.__cause__
    return False


class FollowerReports:
    """What followers have reported to the owner."""

    def __init__(self) -> None:
        self._reports: dict[str, FollowerReport] = {}
        self._drained: dict[str, bool] = {}
        self._said_drained: dict[str, bool] = {}
        """What each follower itself said last."""
        self._lags_us: dict[str, int] = {}
        self._committed: deque[tuple[Position, int]] = deque(maxlen=_SAMPLES_MAX)
        """How far the owner was, and when, in the order of time."""

    def take(self, report: NodeReport, committed: Position, now_us: int) -> None:
        """Take a report; the owner has committed so much."""
        position = Position(report.epoch, report.objects)
        self._said_drained[report.node] = report.drained
        drained = self._drained.get(report.node, report.drained)
        self._reports[report.node] = FollowerReport(
            report.node, position, now_us, drained, report.format_max, report.role not in (RESTORING, BLOCKED)
        )
        if not self._committed or self._committed[-1][0] < committed:
            self._committed.append((committed, now_us))
        beyond_us = next((at_us for reached, at_us in self._committed if reached > position), now_us)
        self._lags_us[report.node] = now_us - beyond_us

    def all(self) -> list[FollowerReport]:
        """The last report of each follower."""
        return list(self._reports.values())

    def get(self, node: str) -> FollowerReport | None:
        """The last report of a follower; None if it has not reported to this owner."""
        return self._reports.get(node)

    def age_us(self, node: str, now_us: int) -> int:
        """How old the last report of a node is; very old if it has not reported to this owner."""
        report = self._reports.get(node)
        return now_us if report is None else now_us - report.heard_us

    def lag_us(self, node: str, now_us: int) -> int:
        """How long ago the first change was committed that a follower had not applied at its last report."""
        report = self._reports.get(node)
        if report is None:
            return 0
        silent_us = now_us - report.heard_us
        return self._lags_us[node] + (silent_us if silent_us > ANSWER_US else 0)

    def set_drained(self, node: str, drained: bool) -> None:
        """Let a node serve nothing, or again."""
        self._drained[node] = drained
        report = self._reports.get(node)
        if report is not None:
            self._reports[node] = report._replace(drained=drained)

    def has_heard(self, node: str, drained: bool) -> bool:
        """Whether a follower knows whether it is to serve: from then on it does so whoever the owner is."""
        return self._said_drained.get(node) == drained

    def drained(self, node: str) -> bool | None:
        """Whether a node was asked to serve nothing; None if nobody asked for either."""
        return self._drained.get(node)
