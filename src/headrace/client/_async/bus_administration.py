"""What a bus has to administer topics, groups, leased subscriptions and schedules."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from headrace.client._async.admin.groups import AsyncGroupAdmin
from headrace.client._async.admin.schedules import AsyncScheduleAdmin
from headrace.client._async.admin.subscriptions import AsyncSubscriptionAdmin
from headrace.client._async.admin.topics import AsyncTopicAdmin
from headrace.client._async.bus_observation import AsyncBusObservation
from headrace.client.producer.pending_batch import checked_key
from headrace.client.producer.serializing import to_bytes
from headrace.client.times import Moment, Start, When, optional_microseconds
from headrace.model.headers import GivenHeaders, checked_headers
from headrace.model.leasing import SubscriptionInfo
from headrace.model.requests import GroupInfo, GroupSummary, TopicInfo
from headrace.model.schedule_requests import ScheduleDefinition, ScheduleInfo
from headrace.model.subscription import DEFAULT_SUBSCRIPTION


class AsyncBusAdministration(AsyncBusObservation):
    """The methods of a bus that administer what a broker has."""

    _topics: AsyncTopicAdmin
    _groups: AsyncGroupAdmin
    _subscriptions: AsyncSubscriptionAdmin
    _schedules: AsyncScheduleAdmin

    # Topics.

    async def create_topic(self, topic: str, *, exist_ok: bool = False, **settings: Any) -> TopicInfo:
        """Create a topic.

        Parameters:
            topic: its name, in the tenant of the bus.
            exist_ok: do not fail if the topic exists, whatever its settings are.
            settings: any of TopicSettings, such as `partitions=8`, `retain_seconds=86400` or `storage="memory"`. With
                `view_of` and `view_query` it is a virtual topic (view): it shows the messages of another topic that a
                content query selects, and stores none.

        Returns:
            The topic's id, settings and partitions.

        Raises:
            TopicExists: if the topic exists and `exist_ok` is not set.
            InvalidArgument: if the name or a setting is wrong.
            InvalidContentQuery: if `view_query` is wrong.
            ContentSupportMissing: if `view_query` needs packages that the broker does not have.
            LimitExceeded: if the broker has `topics_max` topics.

        Example:
            >>> info = await bus.create_topic("clicks", partitions=4, retain_seconds=7 * 86400)
            >>> info.settings["partitions"]
            4
            >>> view = await bus.create_topic("swiss", view_of="clicks", view_query={"partial": {"country": "CH"}})
            >>> view.settings["view_of"]
            'clicks'
        """
        return await self._topics.create(topic, settings, exist_ok)

    async def alter_topic(self, topic: str, **settings: Any) -> TopicInfo:
        """Change settings of a topic while it is in use.

        Parameters:
            topic: the topic.
            settings: the settings to change, of TopicSettings; the number of partitions can only grow.

        Returns:
            The topic as it is now.

        Raises:
            TopicNotFound: if the topic does not exist.
            InvalidArgument: if a setting is wrong or cannot be changed.
            TopicIsView: if it is a virtual topic, whose settings are those of its source.

        Example:
            >>> info = await bus.create_topic("clicks")
            >>> info = await bus.alter_topic("clicks", partitions=8)
            >>> info.settings["partitions"]
            8
        """
        return await self._topics.alter(topic, settings)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic with all its messages.

        Parameters:
            topic: the topic.

        Raises:
            TopicNotFound: if the topic does not exist.
            TopicHasViews: if virtual topics read from it.

        Example:
            >>> info = await bus.create_topic("clicks")
            >>> await bus.delete_topic("clicks")
        """
        await self._topics.delete(topic)

    async def topics(self, pattern: str = "*") -> list[TopicInfo]:
        """List the topics whose names match, without their partitions.

        Parameters:
            pattern: `*` stands for any characters, `?` for one.

        Returns:
            The topics, by name.

        Raises:
            InvalidArgument: if the pattern is wrong.

        Example:
            >>> info = await bus.create_topic("clicks")
            >>> [info.topic for info in await bus.topics("c*")]
            ['clicks']
        """
        return await self._topics.list_matching(pattern)

    async def describe_topic(self, topic: str, *, create: bool = False) -> TopicInfo:
        """Describe a topic: settings, partitions with their offsets, groups that read it.

        Parameters:
            topic: the topic.
            create: create the topic, as publishing does, if it does not exist.

        Returns:
            The topic as it is now.

        Raises:
            TopicNotFound: if the topic does not exist and `create` is not set.

        Example:
            >>> receipt = await bus.publish("orders", b"3 apples")
            >>> (await bus.describe_topic("orders")).settings["durability"]
            'memory'
        """
        return await self._topics.describe(topic, create)

    async def trim_topic(
        self,
        topic: str,
        offsets: Mapping[int, int] | None = None,
        *,
        before: When | None = None,
        unread: bool = False,
        topic_id: int = 0,
    ) -> dict[int, int]:
        """Remove the oldest messages of a topic.

        Parameters:
            topic: the topic.
            offsets: partitions mapped to offsets; messages before them are removed, such as `{0: 1000}`.
            before: instead, for all partitions: remove the messages before the first one of this time or later.
            unread: also remove messages that a group or leased subscription has not read; by default they stay.
            topic_id: trim only if the topic has this id (see `describe_topic`), and was not created again since.

        Returns:
            The first offset that is left, by partition.

        Raises:
            TopicNotFound: if the topic does not exist, or has another id.
            InvalidArgument: if an argument is wrong.

        Example:
            >>> receipts = await bus.publish_many("orders", [b"3 apples", b"5 pears"])
            >>> await bus.trim_topic("orders", {0: 1})
            {0: 1}
        """
        return await self._topics.trim(topic, offsets, before, unread, topic_id)

    async def offsets(
        self, topic: str, at: When = "latest", *, partitions: Sequence[int] | None = None
    ) -> dict[int, int]:
        """Find the offsets of a topic's partitions at a time.

        Parameters:
            topic: the topic.
            at: `earliest`: of the first message; `latest`: after the last one; a datetime or microseconds since
                1970: of the first message of that time or later.
            partitions: only these.

        Returns:
            The offset of each partition.

        Raises:
            TopicNotFound: if the topic does not exist.
            PartitionNotFound: if the topic has no such partition.

        Example:
            >>> receipts = await bus.publish_many("orders", [b"3 apples", b"5 pears"])
            >>> await bus.offsets("orders", at="latest")
            {0: 2}
        """
        return await self._topics.offsets(topic, at, partitions)

    # Groups.

    async def groups(self) -> list[GroupSummary]:
        """List the consumer groups, with members, topics and lag.

        Returns:
            The groups, by name.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> receipt = await bus.publish("orders", b"3 apples")
            >>> await bus.commit("billing", {("orders", 0): 1})
            >>> [(group.group, group.lag) for group in await bus.groups()]
            [('billing', 0)]
        """
        return await self._groups.list_all()

    async def describe_group(self, group: str) -> GroupInfo:
        """Describe a consumer group: its members, and its committed offset and lag in each partition.

        Parameters:
            group: the group.

        Returns:
            The group as it is now.

        Raises:
            GroupNotFound: if the group does not exist.

        Example:
            >>> receipt = await bus.publish("orders", b"3 apples")
            >>> await bus.commit("billing", {("orders", 0): 0})
            >>> (await bus.describe_group("billing")).members
            {}
        """
        return await self._groups.describe(group)

    async def seek_group(
        self, group: str, topic: str, to: Start, *, partitions: Sequence[int] | None = None
    ) -> GroupInfo:
        """Move the committed offsets of a group in a topic; its members continue from there.

        Parameters:
            group: the group.
            topic: the topic.
            to: `earliest`, `latest`, a datetime, or an offset.
            partitions: only these.

        Returns:
            The group as it is now.

        Raises:
            GroupNotFound: if the group does not exist.
            TopicNotFound: if the topic does not exist.
            PartitionNotFound: if the topic has no such partition.

        Example:
            >>> receipts = await bus.publish_many("orders", [b"3 apples", b"5 pears"])
            >>> await bus.commit("billing", {("orders", 0): 2})
            >>> info = await bus.seek_group("billing", "orders", "earliest")
        """
        return await self._groups.seek(group, topic, to, partitions)

    async def delete_group(self, group: str) -> None:
        """Delete a group and its committed offsets.

        Parameters:
            group: the group.

        Raises:
            GroupNotFound: if the group does not exist.
            GroupInUse: if the group has members.

        Example:
            >>> receipt = await bus.publish("orders", b"3 apples")
            >>> await bus.commit("billing", {("orders", 0): 1})
            >>> await bus.delete_group("billing")
        """
        await self._groups.delete(group)

    async def commit(self, group: str, positions: Mapping[tuple[str, int], int]) -> None:
        """Commit offsets for a group without members.

        Parameters:
            group: the group; it is created if it does not exist.
            positions: topics and partitions mapped to the next offset to read, such as `{("orders", 0): 1000}`.

        Raises:
            GroupInUse: if the group has members: only they commit then.
            TopicNotFound: if a topic does not exist.
            InvalidArgument: if an offset or a name is wrong.

        Example:
            >>> receipt = await bus.publish("orders", b"3 apples")
            >>> await bus.commit("billing", {("orders", 0): 1})
        """
        await self._groups.commit(group, positions)

    # Leased subscriptions.

    async def create_subscription(
        self,
        topic: str,
        subscription: str = DEFAULT_SUBSCRIPTION,
        *,
        exist_ok: bool = False,
        start: Start = "earliest",
        create: bool = True,
        **settings: Any,
    ) -> SubscriptionInfo:
        """Create a leased subscription of a topic.

        Parameters:
            topic: the topic.
            subscription: its name; a topic can have several.
            exist_ok: do not fail if it exists, whatever its settings are.
            start: which messages it has: all (`earliest`), only new ones (`latest`), or those from a datetime or an
                offset on.
            create: create the topic if it does not exist and the broker permits it (`auto_create_topics`).
            settings: any of SubscriptionSettings, such as `discipline="priority"` or `deliveries_max=5`.

        Returns:
            The subscription's settings and counts.

        Raises:
            SubscriptionExists: if it exists and `exist_ok` is not set.
            TopicNotFound: if the topic does not exist and is not created.
            InvalidArgument: if a name or a setting is wrong.

        Example:
            >>> info = await bus.create_subscription("tickets", "urgent", discipline="priority")
            >>> info.settings["discipline"]
            'priority'
        """
        return await self._subscriptions.create(topic, subscription, settings, start, exist_ok, create)

    async def alter_subscription(
        self, topic: str, subscription: str = DEFAULT_SUBSCRIPTION, **settings: Any
    ) -> SubscriptionInfo:
        """Change settings of a leased subscription while it is in use.

        Parameters:
            topic: the topic.
            subscription: the subscription.
            settings: the settings to change, of SubscriptionSettings.

        Returns:
            The subscription as it is now.

        Raises:
            SubscriptionNotFound: if the subscription does not exist.
            TopicNotFound: if the topic does not exist.
            InvalidArgument: if a setting is wrong.

        Example:
            >>> info = await bus.create_subscription("tickets")
            >>> info = await bus.alter_subscription("tickets", deliveries_max=5)
            >>> info.settings["deliveries_max"]
            5
        """
        return await self._subscriptions.alter(topic, subscription, settings)

    async def reset_subscription(
        self, topic: str, subscription: str = DEFAULT_SUBSCRIPTION, *, start: Start | None = None
    ) -> SubscriptionInfo:
        """Open a leased subscription again: one that could not be opened, or one that shall start elsewhere.

        All leases end. Settled messages stay settled, and everything else is read again from the log.

        Parameters:
            topic: the topic.
            subscription: the subscription.
            start: discard also what is settled, and start like a new one: see `create_subscription`.

        Returns:
            The subscription as it is now.

        Raises:
            SubscriptionNotFound: if the subscription does not exist.
            TopicNotFound: if the topic does not exist.

        Example:
            >>> info = await bus.create_subscription("tickets")
            >>> info = await bus.reset_subscription("tickets", start="earliest")
        """
        return await self._subscriptions.reset(topic, subscription, start)

    async def delete_subscription(self, topic: str, subscription: str = DEFAULT_SUBSCRIPTION) -> None:
        """Delete a leased subscription; the topic keeps its messages.

        Parameters:
            topic: the topic.
            subscription: the subscription.

        Raises:
            SubscriptionNotFound: if the subscription does not exist.
            TopicNotFound: if the topic does not exist.

        Example:
            >>> info = await bus.create_subscription("tickets")
            >>> await bus.delete_subscription("tickets")
        """
        await self._subscriptions.delete(topic, subscription)

    async def subscriptions(self, topic: str | None = None) -> list[SubscriptionInfo]:
        """List the leased subscriptions.

        Parameters:
            topic: only of this topic; by default of all.

        Returns:
            The subscriptions with their settings and counts.

        Raises:
            TopicNotFound: if the topic does not exist.

        Example:
            >>> info = await bus.create_subscription("tickets", "urgent")
            >>> [info.subscription for info in await bus.subscriptions("tickets")]
            ['urgent']
        """
        return await self._subscriptions.list_all(topic)

    async def describe_subscription(self, topic: str, subscription: str = DEFAULT_SUBSCRIPTION) -> SubscriptionInfo:
        """Describe a leased subscription: its settings, and how many messages it has in which state.

        Parameters:
            topic: the topic.
            subscription: the subscription.

        Returns:
            The subscription as it is now.

        Raises:
            SubscriptionNotFound: if the subscription does not exist.
            TopicNotFound: if the topic does not exist.

        Example:
            >>> info = await bus.create_subscription("tickets")
            >>> (await bus.describe_subscription("tickets")).dead
            0
        """
        return await self._subscriptions.describe(topic, subscription)

    # Schedules.

    async def cron_add(
        self,
        name: str,
        topic: str,
        when: str,
        value: bytes = b"",
        *,
        zone: str = "UTC",
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        partition: int | None = None,
        start: Moment | None = None,
        end: Moment | None = None,
        runs_max: int | None = None,
        missed: str = "once",
        overlap: str = "allow",
        paused: bool = False,
        replace: bool = True,
    ) -> ScheduleInfo:
        """Create a schedule, by which the broker publishes a message repeatedly.

        Parameters:
            name: the name of the schedule.
            topic: the topic of its messages.
            when: a crontab expression of five or six fields (seconds first), such as `*/5 * * * *`, a nickname such as
                `@daily`, or an interval such as `every 90s`.
            value: the message's value.
            zone: the time zone of the expression, such as `Europe/Berlin`.
            key: the message's key.
            headers: the message's headers, besides `headrace-cron` with the name and `headrace-run` with the time.
            partition: the partition, instead of by key.
            start: no run before this time.
            end: no run at this time or later.
            runs_max: no more runs than this.
            missed: for runs that were missed while the broker was down: `skip` them, publish `once` for all of them, or
                `all`.
            overlap: `allow`, or `skip`: no run while a leased subscription of the topic has not settled the last one.
            paused: create it paused, until `cron_pause(name, False)`.
            replace: replace an existing schedule of that name.

        Returns:
            The schedule and its next run.

        Raises:
            ScheduleExists: if the schedule exists and `replace` is false.
            InvalidArgument: if the expression, the zone or another argument is wrong.

        Example:
            >>> info = await bus.cron_add("report", "reports", "0 9 * * mon-fri", b"daily report", zone="Europe/Berlin")
            >>> info.definition.topic
            'reports'
        """
        schedule = ScheduleDefinition(
            name,
            topic,
            when,
            to_bytes(value) or b"",
            checked_key(key),
            checked_headers(headers) or {},
            partition,
            zone,
            optional_microseconds(start),
            optional_microseconds(end),
            runs_max,
            missed,
            overlap,
            paused,
        )
        return await self._schedules.set(schedule, replace)

    async def crons(self, topic: str | None = None) -> list[ScheduleInfo]:
        """List the schedules.

        Parameters:
            topic: only those of this topic; by default all.

        Returns:
            The schedules and their next runs.

        Raises:
            InvalidArgument: if a name is wrong.

        Example:
            >>> info = await bus.cron_add("report", "reports", "@daily")
            >>> [info.definition.name for info in await bus.crons()]
            ['report']
        """
        return await self._schedules.list_all(topic)

    async def cron_remove(self, name: str) -> None:
        """Delete a schedule; the messages that it has published stay.

        Parameters:
            name: the schedule.

        Raises:
            ScheduleNotFound: if the schedule does not exist.

        Example:
            >>> info = await bus.cron_add("report", "reports", "@daily")
            >>> await bus.cron_remove("report")
        """
        await self._schedules.remove(name)

    async def cron_pause(self, name: str, paused: bool = True) -> ScheduleInfo:
        """Pause a schedule, or resume it. Runs that fall into the pause are skipped.

        Parameters:
            name: the schedule.
            paused: false to resume it.

        Returns:
            The schedule as it is now.

        Raises:
            ScheduleNotFound: if the schedule does not exist.

        Example:
            >>> info = await bus.cron_add("report", "reports", "@daily")
            >>> info = await bus.cron_pause("report")
        """
        return await self._schedules.pause(name, paused)

    async def cron_run(self, name: str) -> ScheduleInfo:
        """Publish a schedule's message now, besides its regular runs.

        Parameters:
            name: the schedule.

        Returns:
            The schedule and its next run.

        Raises:
            ScheduleNotFound: if the schedule does not exist.

        Example:
            >>> info = await bus.cron_add("report", "reports", "@daily", b"daily report")
            >>> info = await bus.cron_run("report")
        """
        return await self._schedules.run(name)

    async def cron_next(
        self,
        name: str | None = None,
        when: str | None = None,
        zone: str = "UTC",
        runs: int = 5,
        *,
        after: Moment | None = None,
    ) -> list[datetime]:
        """Compute the next runs of a schedule, or of an expression.

        Parameters:
            name: the name of a schedule;
            when: or an expression, as for `cron_add`,
            zone: in this time zone.
            runs: how many.
            after: after this time; by default now.

        Returns:
            The times, in UTC.

        Raises:
            ScheduleNotFound: if the schedule does not exist.
            InvalidArgument: if the expression or the zone is wrong, or neither or both are given.

        Example:
            >>> from datetime import UTC, datetime
            >>> times = await bus.cron_next(when="0 9 * * *", runs=1, after=datetime(2030, 1, 1, tzinfo=UTC))
            >>> times[0].isoformat()
            '2030-01-01T09:00:00+00:00'
        """
        return await self._schedules.next_runs(name, when, zone, runs, after)
