"""Leased subscriptions and schedules: what is one request and one answer."""

from datetime import UTC, datetime, timedelta
from typing import Any

from headrace.client._async.admin.topics_groups import AsyncTopicGroupAdmin
from headrace.client.producer.pending_batch import GivenHeaders, checked_headers, checked_key
from headrace.client.producer.serializing import to_bytes
from headrace.client.times import Moment, Start, microseconds, spot_at
from headrace.model.errors import InvalidArgument
from headrace.model.leasing import (
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionInfo,
    SubscriptionList,
    SubscriptionReset,
)
from headrace.model.request import Request
from headrace.model.schedule_requests import (
    ScheduleDefinition,
    ScheduleInfo,
    ScheduleList,
    ScheduleNext,
    SchedulePause,
    ScheduleRemove,
    ScheduleRun,
    ScheduleSet,
)
from headrace.model.subscription import DEFAULT_SUBSCRIPTION, plain_settings
from headrace.wire.native import Kind

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class AsyncSubscriptionScheduleAdmin(AsyncTopicGroupAdmin):
    """The part of a bus that makes leased subscriptions and schedules."""

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
        """Make a leased subscription of a topic.

        Parameters:
            topic: whose messages.
            subscription: its name; a topic can have several.
            exist_ok: fine if there is one, whatever its settings are.
            start: which messages: all there are (`earliest`), those to come (`latest`), or those from a datetime or
                an offset on.
            create: make the topic as well if there is none and the broker may make topics by itself
                (`auto_create_topics`).
            settings: any of SubscriptionSettings, such as `discipline="priority"` or `deliveries_max=5`.
        """
        spot = spot_at(start)
        head = SubscriptionCreate(topic, subscription, plain_settings(settings), spot.kind)
        head.exist_ok, head.create_topic = exist_ok, create
        if spot.kind == "time":
            head.start_us = spot.value
        else:
            head.start_offset = spot.value
        return await self._subscription_info(Kind.SUBSCRIPTION_CREATE, head, repeat=exist_ok)

    async def alter_subscription(
        self, topic: str, subscription: str = DEFAULT_SUBSCRIPTION, **settings: Any
    ) -> SubscriptionInfo:
        """Change settings of a leased subscription while it is in use.

        Parameters:
            topic: of which topic.
            subscription: which.
            settings: those of SubscriptionSettings that change.
        """
        head = SubscriptionAlter(topic, plain_settings(settings), subscription)
        return await self._subscription_info(Kind.SUBSCRIPTION_ALTER, head)

    async def reset_subscription(
        self, topic: str, subscription: str = DEFAULT_SUBSCRIPTION, *, start: Start | None = None
    ) -> SubscriptionInfo:
        """Open a leased subscription anew: one that could not be opened, or one that is to begin elsewhere.

        All leases are over. What is settled stays so, and everything else is found anew in the log.

        Parameters:
            topic: of which topic.
            subscription: which.
            start: forget also what is settled, and begin as a new one does: see `create_subscription`.
        """
        head = SubscriptionReset(topic, subscription)
        if start is not None:
            spot = spot_at(start)
            head.start = spot.kind
            if spot.kind == "time":
                head.start_us = spot.value
            else:
                head.start_offset = spot.value
        return await self._subscription_info(Kind.SUBSCRIPTION_RESET, head, repeat=False)

    async def delete_subscription(self, topic: str, subscription: str = DEFAULT_SUBSCRIPTION) -> None:
        """Forget a leased subscription; the topic keeps its messages."""
        head = SubscriptionDelete(topic, subscription)
        await self._broker.request(Kind.SUBSCRIPTION_DELETE, head, repeat=False)

    async def subscriptions(self, topic: str | None = None, *, tenant: str = "") -> list[SubscriptionInfo]:
        """The leased subscriptions there are.

        Parameters:
            topic: of this topic; by default of all.
            tenant: whose; by default the default tenant's.
        """
        answer, _ = await self._broker.request(Kind.SUBSCRIPTION_LIST, SubscriptionList(topic or "", tenant))
        subscriptions: list[SubscriptionInfo] = answer.subscriptions
        return subscriptions

    async def describe_subscription(self, topic: str, subscription: str = DEFAULT_SUBSCRIPTION) -> SubscriptionInfo:
        """A leased subscription as it is now: its settings, and how many messages it has in which state."""
        return await self._subscription_info(Kind.SUBSCRIPTION_DESCRIBE, SubscriptionDescribe(topic, subscription))

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
        """Publish a message again and again.

        Parameters:
            name: by which the schedule goes.
            topic: where to.
            when: a crontab expression of five or six fields (seconds first), such as `*/5 * * * *`, a nickname such as
                `@daily`, or an interval such as `every 90s`.
            value: of the message.
            zone: the time zone of the expression, such as `Europe/Berlin`.
            key: of the message.
            headers: of the message, besides `headrace-cron` with the name and `headrace-run` with the time.
            partition: where to, instead of by key.
            start: no run before this time.
            end: no run at this time or later.
            runs_max: no more runs than this.
            missed: what becomes of runs that were missed while the broker was down: `skip` them, `once` for all of
                them, or `all`.
            overlap: `allow`, or `skip`: no run while a leased subscription of the topic has not settled the last one.
            paused: make it, but let it rest until `cron_pause(name, False)`.
            replace: the one of that name, if there is one; else ScheduleExists is raised.
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
            None if start is None else microseconds(start),
            None if end is None else microseconds(end),
            runs_max,
            missed,
            overlap,
            paused,
        )
        return await self._cron_info(Kind.SCHEDULE_SET, ScheduleSet(schedule, replace), repeat=replace)

    async def crons(self, topic: str | None = None, *, tenant: str = "") -> list[ScheduleInfo]:
        """The schedules there are.

        Parameters:
            topic: for this topic; by default all.
            tenant: whose; by default the default tenant's.
        """
        answer, _ = await self._broker.request(Kind.SCHEDULE_LIST, ScheduleList(topic or "", tenant))
        schedules: list[ScheduleInfo] = answer.schedules
        return schedules

    async def cron_remove(self, name: str) -> None:
        """Forget a schedule; messages it has published stay."""
        await self._broker.request(Kind.SCHEDULE_REMOVE, ScheduleRemove(name), repeat=False)

    async def cron_pause(self, name: str, paused: bool = True) -> ScheduleInfo:
        """Let a schedule rest, or go on. Runs that fall into the pause are left out."""
        return await self._cron_info(Kind.SCHEDULE_PAUSE, SchedulePause(name, paused))

    async def cron_run(self, name: str) -> ScheduleInfo:
        """Publish a schedule's message now, besides its regular runs."""
        return await self._cron_info(Kind.SCHEDULE_RUN, ScheduleRun(name), repeat=False)

    async def cron_next(
        self,
        name: str | None = None,
        when: str | None = None,
        zone: str = "UTC",
        runs: int = 5,
        *,
        after: Moment | None = None,
    ) -> list[datetime]:
        """When the next runs are, of a schedule there is or of an expression that is to be tried out.

        Parameters:
            name: of a schedule;
            when: or an expression, as for `cron_add`,
            zone: in this time zone.
            runs: how many.
            after: after this time; by default now.
        """
        if (name is None) == (when is None):
            raise InvalidArgument("say whose runs: give a name, or an expression; one of the two")
        tried = None if when is None else ScheduleDefinition("try", "try", when, zone=zone)
        head = ScheduleNext(name or "", tried, runs, None if after is None else microseconds(after))
        answer, _ = await self._broker.request(Kind.SCHEDULE_NEXT, head)
        return [_EPOCH + timedelta(microseconds=time_us) for time_us in answer.times_us]

    async def _subscription_info(self, kind: Kind, head: Request[Any], *, repeat: bool = True) -> SubscriptionInfo:
        info: SubscriptionInfo
        info, _ = await self._broker.request(kind, head, repeat=repeat)
        return info

    async def _cron_info(self, kind: Kind, head: Request[Any], *, repeat: bool = True) -> ScheduleInfo:
        info: ScheduleInfo
        info, _ = await self._broker.request(kind, head, repeat=repeat)
        return info
