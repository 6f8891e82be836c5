"""Reads the messages of one key by version, a page at a time, without a scan of the topic."""

from collections.abc import Sequence

from headrace.broker.active_partition import ActivePartition
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer, encode_detached_batch
from headrace.broker.slices import TimedSteps
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.turns import Turns
from headrace.engines.api import KeyEntry, StoredMessages, stored_messages
from headrace.model.batch import Columns, message_sizes
from headrace.model.errors import EventsMissing, HeadraceError, InvalidArgument, TopicNotFound
from headrace.model.key_versions import VERSION_MAX, History, HistoryPage
from headrace.model.limits import HISTORY_BYTES_MAX, HISTORY_MESSAGES_MAX
from headrace.model.partitioning import by_key

_FIELDS = ("keys", "headers", "dues", "priorities", "expires")
_READ_TOGETHER = 8
"""Messages read per slice: each may be in a batch of its own."""


class KeyHistory:
    """Answers History."""

    def __init__(self, topics: TopicRegistry, turns: Turns) -> None:
        self._topics = topics
        self._turns = turns

    def page(self, request: History, now_us: int) -> PendingAnswer[HistoryPage | AnswerWithBody[HistoryPage]]:
        """Read a page of a key's history."""
        topic = self._topics.get(request.topic)
        _check(topic, request)
        active = self._topics.active(topic, by_key(request.key, topic.settings.partitions))
        answer: PendingAnswer[HistoryPage | AnswerWithBody[HistoryPage]] = PendingAnswer()

        def loaded(error: HeadraceError | None) -> None:
            if error is not None:
                answer.resolve(error)
            else:
                self._turns.in_slices(self._page(request, topic, active, now_us)).then(answer.resolve)

        assert active.gate is not None  # the topic has key_versions
        active.gate.when_loaded(loaded)
        return answer

    def _page(self, request: History, topic: Topic, active: ActivePartition, now_us: int) -> TimedSteps:
        end, start, gate = active.end_offset, request.start_version, active.gate
        if gate is None:
            raise InvalidArgument(f"key_versions was turned off for {topic}")
        page = HistoryPage([], [], active.number, topic.id)
        page.next_version = gate.index.visible_version(request.key, end)
        contents, parts, size = stored_messages(active.delivered), list[Columns](), 0
        while not page.offsets:
            entries, page.following = gate.index.find(request.key, start, request.messages_max, end)
            for first in range(0, len(entries), _READ_TOGETHER):
                some = entries[first : first + _READ_TOGETHER]
                columns = _read(active, contents, some, page)
                parts.append(columns)
                size += sum(message_sizes(columns))
                now_us = yield
                if size >= request.bytes_max and first + len(some) < len(entries):
                    page.following = entries[first + len(some)].version
                    break
            if page.following is None or active.gone is not None:
                break
            start = page.following  # compaction has removed all before
            now_us = yield
        if active.gone is not None:
            raise TopicNotFound(str(active.gone))
        return AnswerWithBody(page, encode_detached_batch(_joined(parts), now_us)) if page.offsets else page


def _check(topic: Topic, request: History) -> None:
    if not topic.settings.key_versions:
        raise InvalidArgument(f"{topic} has no history of keys: it needs the setting key_versions")
    if not 0 <= request.start_version <= VERSION_MAX:
        raise InvalidArgument(f"start_version is 0 to {VERSION_MAX}, not {request.start_version}")
    if not 0 < request.messages_max <= HISTORY_MESSAGES_MAX or not 0 < request.bytes_max <= HISTORY_BYTES_MAX:
        raise InvalidArgument(
            f"a page has 1 to {HISTORY_MESSAGES_MAX} messages and 1 to {HISTORY_BYTES_MAX} bytes, not "
            f"{request.messages_max} and {request.bytes_max}"
        )


def _read(active: ActivePartition, contents: StoredMessages, entries: Sequence[KeyEntry], page: HistoryPage) -> Columns:
    """Read messages, and add to the page those that there are; what compaction has just removed is left out."""
    columns, offsets = contents.read_stored([entry.offset for entry in entries])
    if len(offsets) < len(entries):
        there = set(offsets)
        for version, offset in entries:
            if offset not in there and active.partition.damaged_within(range(offset, offset + 1)):
                raise EventsMissing(
                    f"version {version} of the key is damaged in the log of {active.topic}: partition {active.number}, "
                    f"offset {offset}; `headrace verify` tells more",
                    version=version,
                    offset=offset,
                )
        entries = [entry for entry in entries if entry.offset in there]
    page.offsets += offsets
    page.versions += [entry.version for entry in entries]
    return columns


def _joined(parts: Sequence[Columns]) -> Columns:
    """The messages of several columns, in this order."""
    values = [value for part in parts for value in part.values]
    joined = Columns(values, timestamps=[time for part in parts for time in part.timestamps or ()])
    for name in _FIELDS:
        if any(getattr(part, name) is not None for part in parts):
            column = [each for part in parts for each in getattr(part, name) or [None] * len(part.values)]
            setattr(joined, name, column)
    return joined
