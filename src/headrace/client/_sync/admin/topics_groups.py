"""Topics, groups and reading by hand: what is one request and one answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.client._sync.concurrency import now
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client._sync.producer.metadata_cache import MetadataCache
from headrace.client.times import Start, When, listed, spot_at, spot_in_time
from headrace.model.arguments import checked_timeout, shown
from headrace.model.batch import Batch, parse
from headrace.model.errors import CorruptBatch, InvalidArgument, InvalidBatch
from headrace.model.reading import Fetch
from headrace.model.request import Request
from headrace.model.requests import (
    BrokerInfo,
    Commit,
    GroupDelete,
    GroupDescribe,
    GroupInfo,
    GroupList,
    GroupSeek,
    GroupSummary,
    Info,
    Offsets,
    PartitionOffset,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicInfo,
    TopicList,
    TopicTrim,
)
from headrace.wire.native import Kind


class TopicGroupAdmin:
    """The part of a bus that asks and answers."""

    def __init__(self, broker: ReconnectingConnection, metadata_cache: MetadataCache) -> None:
        self._broker = broker
        self._metadata_cache = metadata_cache

    # Topics.

    def create_topic(self, topic: str, *, exist_ok: bool = False, **settings: Any) -> TopicInfo:
        """Make a topic.

        Parameters:
            topic: its name; `tenant/topic` in another tenant than the default one.
            exist_ok: fine if there is one, whatever its settings are.
            settings: any of TopicSettings, such as `partitions=8`, `retain_seconds=86400` or `storage="memory"`.
        """
        head = TopicCreate(topic, settings, exist_ok)
        return self._topic_info(Kind.TOPIC_CREATE, head, topic, repeat=exist_ok)

    def alter_topic(self, topic: str, **settings: Any) -> TopicInfo:
        """Change settings of a topic while it is in use.

        Parameters:
            topic: which.
            settings: those of TopicSettings that change; there can be more partitions, never less.
        """
        return self._topic_info(Kind.TOPIC_ALTER, TopicAlter(topic, settings), topic)

    def delete_topic(self, topic: str) -> None:
        """Remove a topic with all its messages."""
        self._metadata_cache.forget(topic)
        self._broker.request(Kind.TOPIC_DELETE, TopicDelete(topic), repeat=False)
        self._metadata_cache.forget(topic)

    def topics(self, pattern: str = "*", *, tenant: str = "") -> list[TopicInfo]:
        """The topics whose names match, without their partitions.

        Parameters:
            pattern: `*` stands for any characters, `?` for one.
            tenant: whose; by default the default tenant's.
        """
        answer, _ = self._broker.request(Kind.TOPIC_LIST, TopicList(pattern, tenant))
        topics: list[TopicInfo] = answer.topics
        return topics

    def describe_topic(self, topic: str, *, create: bool = False) -> TopicInfo:
        """A topic as it is now: settings, partitions with their offsets, groups that read it.

        Parameters:
            topic: which.
            create: whether to make it, as publishing does, if there is none.
        """
        return self._topic_info(Kind.TOPIC_DESCRIBE, TopicDescribe(topic, create), topic)

    def trim_topic(
        self,
        topic: str,
        offsets: Mapping[int, int] | None = None,
        *,
        before: When | None = None,
        unread: bool = False,
        topic_id: int = 0,
    ) -> dict[int, int]:
        """Remove the oldest messages of a topic; returns the first offsets that there are now.

        Parameters:
            topic: which.
            offsets: partitions to the offsets before which messages go, such as `{0: 1000}`.
            before: instead, for all partitions: the messages before the first one of this time or later.
            unread: also messages that some group or leased subscription has still to read; without this they stay.
            topic_id: only if the topic has this id (`describe_topic` tells it), and was not made again since.
        """
        if (offsets is None) == (before is None):
            raise InvalidArgument("say which messages go: give either offsets or a time")
        deadline = now() + self._broker.timeout
        if offsets is not None and not isinstance(offsets, Mapping):
            raise InvalidArgument(f"offsets are partitions to offsets, such as {{0: 1000}}, not {shown(offsets)}")
        if offsets is None:
            assert before is not None
            offsets = self.offsets(topic, before)
        head = TopicTrim(topic, dict(offsets), unread, topic_id)
        answer, _ = self._broker.request(Kind.TOPIC_TRIM, head, timeout=deadline - now())
        first: dict[int, int] = answer.offsets
        return first

    def offsets(self, topic: str, at: When = "latest", *, partitions: Sequence[int] | None = None) -> dict[int, int]:
        """Which offsets partitions have at a time.

        Parameters:
            topic: which.
            at: `earliest`: of the first message there is; `latest`: behind the last; a datetime or microseconds since
                1970: of the first message of that time or later.
            partitions: only these.
        """
        spot = spot_in_time(at)
        head = Offsets(topic, listed(partitions or (), "partitions"), spot.kind, spot.value)
        answer, _ = self._broker.request(Kind.OFFSETS, head)
        offsets: dict[int, int] = answer.offsets
        return offsets

    def fetch(
        self, topic: str, partition: int, offset: int, *, bytes_max: int = 1 << 20, wait: float = 0.0
    ) -> list[Batch]:
        """Read batches of a partition by hand.

        Parameters:
            topic: which.
            partition: which.
            offset: of the first message that is wanted; the first batch may begin before it.
            bytes_max: how much to read at most, but one batch in any case.
            wait: how many seconds to wait for a message if there is none.
        """
        wait = checked_timeout(wait, "wait")
        head = Fetch(topic, partition, offset, bytes_max, round(wait * 1000))
        _, body = self._broker.request(Kind.FETCH, head, timeout=self._broker.timeout + wait)
        batches: list[Batch] = []
        view, position = memoryview(body), 0
        while position < len(view):
            batch = parse(view, position)
            try:
                batch.verify()
            except InvalidBatch as error:
                if batches:
                    break  # those before it are good; the next fetch begins with it
                # The broker looks at it, too, so that it logs and lists what is damaged on its disk.
                self._broker.request(Kind.FETCH, Fetch(topic, partition, batch.base_offset, 1, 0, verify=True))
                where = f"{topic}[{partition}] as it was received"
                raise CorruptBatch(batch.base_offset, batch.next_offset, where, position, str(error)) from error
            batches.append(batch)
            position += batch.length
        return batches

    # Groups.

    def groups(self, *, tenant: str = "") -> list[GroupSummary]:
        """The groups there are, with members, topics and lag."""
        answer, _ = self._broker.request(Kind.GROUP_LIST, GroupList(tenant))
        groups: list[GroupSummary] = answer.groups
        return groups

    def describe_group(self, group: str) -> GroupInfo:
        """A group as it is now: its members, and how far it has come in each partition."""
        return self._group_info(Kind.GROUP_DESCRIBE, GroupDescribe(group))

    def seek_group(self, group: str, topic: str, to: Start, *, partitions: Sequence[int] | None = None) -> GroupInfo:
        """Move a group to another place in a topic; its members go on from there.

        Parameters:
            group: which.
            topic: in which topic.
            to: `earliest`, `latest`, a datetime, or an offset.
            partitions: only these.
        """
        spot = spot_at(to)
        head = GroupSeek(group, topic, listed(partitions or (), "partitions"), spot.kind)
        if spot.kind == "time":
            head.time_us = spot.value
        else:
            head.offset = spot.value
        return self._group_info(Kind.GROUP_SEEK, head)

    def delete_group(self, group: str) -> None:
        """Forget a group and its positions; it must have no members."""
        self._broker.request(Kind.GROUP_DELETE, GroupDelete(group), repeat=False)

    def commit(self, group: str, positions: Mapping[tuple[str, int], int]) -> None:
        """Set positions of a group that has no members at work.

        Parameters:
            group: which.
            positions: topics and partitions to the offsets to go on with, such as `{("orders", 0): 1000}`.
        """
        try:
            places = [PartitionOffset(topic, partition, offset) for (topic, partition), offset in positions.items()]
        except (AttributeError, TypeError, ValueError) as error:
            meant = "positions are topics and partitions to offsets, such as {('orders', 0): 1000}"
            told = f"{meant}, not {shown(positions)}"
            raise InvalidArgument(told) from error
        self._broker.request(Kind.COMMIT, Commit(group, places))

    def info(self) -> BrokerInfo:
        """What there is to know about the broker."""
        info: BrokerInfo
        info, _ = self._broker.request(Kind.INFO, Info())
        return info

    def _topic_info(self, kind: Kind, head: Request[Any], topic: str, *, repeat: bool = True) -> TopicInfo:
        info: TopicInfo
        info, _ = self._broker.request(kind, head, repeat=repeat)
        self._metadata_cache.learn(topic, info)
        return info

    def _group_info(self, kind: Kind, head: Request[Any]) -> GroupInfo:
        info: GroupInfo
        info, _ = self._broker.request(kind, head)
        return info
