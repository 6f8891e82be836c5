"""Topics, groups and the broker itself, as resources."""

from typing import Annotated, Literal

import msgspec

from headrace.gateways.http.call import Call, Reply, json_reply
from headrace.gateways.http.event_position import parse_position
from headrace.gateways.http.paging import PageQuery, page
from headrace.gateways.http.problems import HttpError
from headrace.gateways.http.route import Route, request_route
from headrace.gateways.http.setting_fields import TopicSettingsFields
from headrace.gateways.http.websub_hub import hub_links
from headrace.model.envelope import TimeOrText, TimeText, parse_time_text, time_us
from headrace.model.requests import (
    Commit,
    GroupDelete,
    GroupDescribe,
    GroupInfo,
    GroupList,
    GroupSeek,
    GroupSummary,
    Info,
    Offsets,
    OffsetsFound,
    PartitionOffset,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicInfo,
    TopicList,
    TopicTrim,
)

TOPICS, GROUPS, BROKER = "topics", "groups", "broker"
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]


class OffsetFields(msgspec.Struct, forbid_unknown_fields=True):
    """An offset in a partition."""

    topic: str
    partition: _Count
    offset: _Count


class TopicQuery(PageQuery, forbid_unknown_fields=True):
    """Which topics."""

    pattern: str = "*"
    """`*` stands for any characters, `?` for one."""


class TopicPage(msgspec.Struct):
    """Topics by name, without their partitions."""

    topics: list[TopicInfo]
    next: str = ""
    """The cursor of the next page; empty at the end."""


class GroupPage(msgspec.Struct):
    """Groups by name."""

    groups: list[GroupSummary]
    next: str = ""
    """The cursor of the next page; empty at the end."""


class OffsetsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """At which time."""

    at: Literal["earliest", "latest"] = "latest"
    time: TimeText | None = None
    """Instead: of the first messages with this timestamp or a later one."""


class GroupCommit(msgspec.Struct, forbid_unknown_fields=True):
    """Where a group is to go on: the position of an event stream, or offsets."""

    topic: str = ""
    """The topic that `position` is about."""
    position: str = ""
    """The id of an event: for each partition the offset of the next message, such as `0:17,1:4`."""
    offsets: list[OffsetFields] = []
    """Instead: offsets of the next messages, in any topics."""


class GroupSeekTime(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where the members of a group are to go on."""

    topic: str
    partitions: list[_Count] = []
    """None: all of them."""
    to: Literal["offset", "earliest", "latest", "time"]
    offset: _Count = 0
    time: TimeOrText = 0


class Health(msgspec.Struct):
    """Whether the broker works."""

    status: Literal["ok", "draining"]


async def list_topics(call: Call) -> Reply:
    """Answer a page of topics."""
    query = call.query(TopicQuery)
    found = await call.ask(TopicList(query.pattern))
    topics, following = page(found.topics, lambda topic: topic.topic, query)
    return json_reply(TopicPage(topics, following))


async def describe_topic(call: Call) -> Reply:
    """Answer what a topic is like, and where to subscribe to it."""
    described = await call.ask(TopicDescribe(call.parameters[0]))
    return json_reply(described, headers=hub_links(call))


async def list_groups(call: Call) -> Reply:
    """Answer a page of groups."""
    query = call.query(PageQuery)
    found = await call.ask(GroupList())
    groups, following = page(found.groups, lambda group: group.group, query)
    return json_reply(GroupPage(groups, following))


async def find_offsets(call: Call) -> Reply:
    """Answer the offsets of all partitions at a time."""
    query = call.query(OffsetsQuery)
    (topic,) = call.parameters
    if query.time is None:
        return json_reply(await call.ask(Offsets(topic, [], query.at)))
    return json_reply(await call.ask(Offsets(topic, [], "time", parse_time_text(query.time))))


_commit_decoder = msgspec.json.Decoder(GroupCommit)
_seek_decoder = msgspec.json.Decoder(GroupSeekTime)


async def commit_offsets(call: Call) -> Reply:
    """Commit offsets of a group."""
    given = await call.decoded(_commit_decoder)
    if bool(given.position) == bool(given.offsets) or bool(given.position) != bool(given.topic):
        raise HttpError(
            "invalid_field", "a commit has a `topic` and a `position`, or else `offsets`, and not none of them"
        )
    places = [PartitionOffset(one.topic, one.partition, one.offset) for one in given.offsets]
    if given.position:
        position = parse_position(given.position)
        places += [PartitionOffset(given.topic, number, offset) for number, offset in position.items()]
    await call.ask(Commit(call.parameters[0], places))
    return Reply(204)


async def seek_group(call: Call) -> Reply:
    """Set a group's offsets."""
    given = await call.decoded(_seek_decoder)
    (group,) = call.parameters
    seek = GroupSeek(group, given.topic, given.partitions, given.to, given.offset, time_us(given.time))
    return json_reply(await call.ask(seek))


async def check_health(_: Call) -> Reply:
    """Answer that the process serves requests."""
    return json_reply(Health("ok"))


async def check_readiness(call: Call) -> Reply:
    """Answer whether the broker takes new work."""
    if call.gateway.draining:
        return json_reply(Health("draining"), 503)
    return json_reply(Health("ok"))


_SETTINGS = {"settings": TopicSettingsFields}

TOPIC_ROUTES = [
    Route(
        "GET", "/v1/topics", list_topics, "List topics", TOPICS, query=TopicQuery, answer=TopicPage
    ),
    request_route(
        TopicCreate, "POST", "/v1/topics", tag=TOPICS, status=201, replaced=_SETTINGS, errors=("topic_exists",),
        example={"topic": "orders", "settings": {"partitions": 3, "retain_seconds": 604800}},
    ),
    Route(
        "GET", "/v1/topics/{topic}", describe_topic, "Describe a topic", TOPICS, answer=TopicInfo,
        errors=("topic_not_found",), answer_headers=("Link",),
    ),
    request_route(
        TopicAlter, "PATCH", "/v1/topics/{topic}", tag=TOPICS, replaced=_SETTINGS, errors=("topic_not_found",),
        example={"settings": {"retain_bytes": 1 << 30}},
    ),
    request_route(TopicDelete, "DELETE", "/v1/topics/{topic}", tag=TOPICS, errors=("topic_not_found",)),
    request_route(
        TopicTrim, "POST", "/v1/topics/{topic}/trims", tag=TOPICS, errors=("topic_not_found", "partition_not_found"),
        example={"offsets": {"0": 1000}},
    ),
    Route(
        "GET", "/v1/topics/{topic}/offsets", find_offsets, "Find the offsets of all partitions at a time", TOPICS,
        query=OffsetsQuery, answer=OffsetsFound, errors=("topic_not_found",),
    ),
    Route("GET", "/v1/groups", list_groups, "List groups", GROUPS, query=PageQuery, answer=GroupPage),
    request_route(GroupDescribe, "GET", "/v1/groups/{group}", tag=GROUPS, errors=("group_not_found",)),
    request_route(
        GroupDelete, "DELETE", "/v1/groups/{group}", tag=GROUPS, errors=("group_not_found", "group_in_use")
    ),
    Route(
        "POST", "/v1/groups/{group}/seeks", seek_group, "Set a group's offsets; its members continue from there",
        GROUPS, body=GroupSeekTime, body_required=True, answer=GroupInfo,
        errors=("group_not_found", "topic_not_found"), example={"topic": "orders", "to": "earliest"},
    ),
    Route(
        "POST", "/v1/groups/{group}/commits", commit_offsets,
        "Commit offsets of a group: those of the next messages to read", GROUPS, 204, body=GroupCommit,
        errors=("topic_not_found", "partition_not_found", "group_in_use"),
        example={"topic": "orders", "position": "0:17,1:4"},
    ),
    request_route(Info, "GET", "/v1/broker", tag=BROKER),
    Route(
        "GET", "/healthz", check_health, "Whether the process serves requests", BROKER, answer=Health, is_public=True
    ),
    Route(
        "GET", "/readyz", check_readiness, "Whether the broker takes new work", BROKER, answer=Health,
        other_statuses=(503,), is_public=True,
    ),
]  # fmt: skip
"""The routes about topics, groups and the broker."""
