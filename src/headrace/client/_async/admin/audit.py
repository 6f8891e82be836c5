"""The audit trail: who did what, or tried to, with a proof that nothing was removed or changed."""

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client.times import Start
from headrace.model.audit import AuditDescribe, AuditHead, AuditInfo, AuditRecord, decode_record
from headrace.model.audit_chain import AuditReport, ChainVerifier
from headrace.model.errors import CorruptBatch, InvalidArgument, TopicNotFound
from headrace.model.system_topics import AUDIT_TOPIC

if TYPE_CHECKING:
    from headrace.client._async.bus import AsyncBus
    from headrace.client._async.consumer.subscription import AsyncSubscription

_LIMIT_MAX = 100_000


class AsyncAudit:
    """Reads and verifies the audit trail of this tenant; `bus.audit`.

    The broker writes it to the topic `headrace.audit` while security is enabled, or with the setting `audit`.

    Example:
        >>> (await bus.audit.describe()).enabled
        False
    """

    def __init__(self, bus: "AsyncBus", broker: AsyncReconnectingConnection) -> None:
        self._bus = bus
        self._broker = broker

    async def describe(self) -> AuditInfo:
        """Return whether actions are recorded, and the last record.

        Returns:
            An AuditInfo.

        Raises:
            Forbidden: if the identity may not read `headrace.audit`.
            Timeout: if the broker does not answer in time.

        Example:
            >>> (await bus.audit.describe()).number
            0
        """
        return await self._broker.request(AuditDescribe())

    async def history(self, limit: int = 1000) -> list[AuditRecord]:
        """Return the newest records.

        Parameters:
            limit: how many at most, up to 100,000.

        Returns:
            The records, the oldest first.

        Raises:
            InvalidArgument: if the limit is wrong, or a message of the topic is no record.
            Timeout: if the broker does not answer in time.

        Example:
            >>> await bus.audit.history()
            []
        """
        if not 0 < limit <= _LIMIT_MAX:
            raise InvalidArgument(f"limit is 1 to {_LIMIT_MAX}, not {limit}")
        first, end = await self._range()
        contents = self._contents(max(first, end - limit), end)
        return [decode_record(content) async for _, content in contents if content is not None]

    async def follow(self, start: Start = "latest", *, timeout: float | None = None) -> "AsyncSubscription":
        """Receive records as they are written.

        Parameters:
            start: where to start: `earliest`, `latest`, a datetime, or an offset.
            timeout: end the iteration after so many seconds without a record; by default never.

        Returns:
            A subscription, for use in `with`: the value of each message is an AuditRecord.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> records = await bus.audit.follow("earliest", timeout=10)
            >>> await records.close()
        """
        return self._bus.subscribe(AUDIT_TOPIC, start=start, deserializer=decode_record, timeout=timeout)

    async def verify(self, *, from_start: bool = False, heads: Iterable[AuditHead] = ()) -> AuditReport:
        """Read the whole trail, and tell whether records were removed, altered or reordered.

        Records that retention or trimming removed at the beginning are accepted, unless `from_start` is given. The
        end of the trail is compared with what the broker says. Whoever can change the broker's files can write a new
        trail that is consistent in itself: keep a head elsewhere, and give it here.

        Parameters:
            from_start: accept no trail whose first record is not there any more.
            heads: records that must be in the trail, as an earlier report or `describe` told them.

        Returns:
            An AuditReport: `intact`, `findings`, and the `head` to keep.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> report = await bus.audit.verify()
            >>> report.intact, report.records
            (True, 0)
        """
        info = await self.describe()
        told = AuditHead(info.number, info.digest, info.offset)
        first, end = await self._range()
        verifier = ChainVerifier(from_start=from_start, heads=[*heads, told])
        async for offset, content in self._contents(first, end):
            verifier.take(offset, content)
        return verifier.report()

    async def _range(self) -> tuple[int, int]:
        try:
            first = (await self._bus.offsets(AUDIT_TOPIC, at="earliest"))[0]
            return first, (await self._bus.offsets(AUDIT_TOPIC, at="latest"))[0]
        except TopicNotFound:
            return 0, 0

    async def _contents(self, offset: int, end: int) -> AsyncIterator[tuple[int, bytes | None]]:
        while offset < end:
            try:
                batches = await self._bus.fetch(AUDIT_TOPIC, 0, offset)
            except CorruptBatch as error:
                yield offset, None
                offset = max(error.next_offset, offset + 1)
                continue
            if not batches:
                break
            for batch in batches:
                for at, content in enumerate(batch.columns().values, batch.base_offset):
                    if offset <= at < end:
                        yield at, None if content is None else bytes(content)
                offset = max(offset, batch.base_offset + batch.span)
