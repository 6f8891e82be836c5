"""`headrace topic`: create, list, describe, alter, trim and delete topics, and read the history of a key."""

import argparse
import json
import os
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.cli.arguments import command_maker, completes, count, json_value, relative_moment
from headrace.cli.connection import add_connection, add_yes, confirmed, connected
from headrace.cli.message_formats import as_json, as_text, time_text
from headrace.cli.setting_options import add_settings, duration_text, given_settings, setting_text, size_text
from headrace.cli.terminal.colours import paint
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import EXIT_ERROR, Output, counted, offsets_text, table
from headrace.cli.terminal.watch import add_watch
from headrace.model.requests import TopicInfo
from headrace.model.topic import SYSTEM_PREFIX, parse_topic

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus
    from headrace.client.results import Received

_VALUES = """\
SIZE is a number of bytes, or one with a unit: 10GB, 512MiB. TIME is a number of
seconds, or one with a unit: 250ms, 30s, 15m, 12h, 7d. Optional settings can be set
to none."""

_CREATE = f"""\
examples:
  headrace topic create orders
  headrace topic create orders --partitions 4 --retain-seconds 7d --retain-bytes 10GB
  headrace topic create jobs --validity until_consumed
  headrace topic create prices --compact-by-key --exist-ok
  headrace topic create chat --storage memory --memory-bytes 64MiB
  headrace topic create logs --middleware '[{{"name": "compress"}}]'
  headrace topic create large-orders --view-of orders --where-jsonpath '$[?$.amount > 1000]'
  headrace topic create swiss-orders --view-of orders --where-partial '{{"country": "CH"}}'

{_VALUES}
With --view-of the topic is a virtual topic (view): it stores nothing, and shows the
messages of another topic whose values match one of --where-exact, --where-partial,
--where-regex and --where-jsonpath. It has the settings of that topic.
The defaults are in the brackets; the broker's configuration can change them. For
another tenant's topics, give --tenant NAME.
"""

_LIST = """\
examples:
  headrace topic list
  headrace topic list 'orders.*' --json
  headrace topic list --names | xargs -n 1 headrace topic describe

In PATTERN, * matches any characters and ? matches one. Topics of Headrace itself,
such as headrace.events, are listed with --all, or if PATTERN begins like them.
"""

_DESCRIBE = """\
example:
  headrace topic describe orders --json
"""

_ALTER = f"""\
examples:
  headrace topic alter orders --retain-seconds 30d
  headrace topic alter orders --retain-bytes none --partitions 8
  headrace topic alter orders --middleware none

{_VALUES}
Works while the topic is in use. Settings that are not given do not change.
"""

_TRIM = """\
examples:
  headrace topic trim orders --before-time '30d ago'
  headrace topic trim orders --before-offset 1000 --partition 0 --yes

Removes the oldest messages. Messages that a group or a leased subscription has not
read yet stay, unless --unread is given. A time is ISO 8601 (UTC if it names no
zone), or '30d ago'. Asks for confirmation on a terminal; otherwise it needs --yes.
"""

_DELETE = """\
example:
  headrace topic delete orders --yes

Deletes the topic with all its messages. Asks for confirmation on a terminal;
otherwise it needs --yes.
"""


_HISTORY = """\
examples:
  headrace topic history accounts ann
  headrace topic history accounts ann --start-version 100 --json
  headrace topic history accounts ann -n 1 --values

Prints the messages of one key in the order of their versions, without reading the
rest of the topic: version, partition and offset, time, key, value and headers,
separated by tabs. The topic has the setting key_versions.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace topic`."""
    parser.epilog = "`headrace topic COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    creating = make("create", create, "make a topic", _CREATE)
    _add_topic(creating)
    creating.add_argument("--exist-ok", action="store_true", help="succeed if the topic already exists")
    _add_query(creating)
    add_settings(creating)
    creating.set_defaults(check=_check_create)
    listing = make("list", list_topics, "list topics and their retention", _LIST)
    listing.add_argument("pattern", metavar="PATTERN", nargs="?", default="*", help="only topics whose names match")
    listing.add_argument("--names", action="store_true", help="print only the names")
    listing.add_argument("--all", action="store_true", help="Headrace's own topics, too: headrace.*")
    describing = make("describe", describe, "describe a topic", _DESCRIBE)
    _add_topic(describing, "topic")
    altering = make("alter", alter, "change the settings of a topic", _ALTER)
    _add_topic(altering, "topic")
    add_settings(altering)
    altering.set_defaults(check=_check_alter)
    trimming = make("trim", trim, "remove the oldest messages of a topic", _TRIM)
    _add_topic(trimming, "topic")
    _add_trim(trimming)
    reading = make("history", history, "print the messages of one key by version", _HISTORY)
    _add_topic(reading, "topic")
    _add_history(reading)
    deleting = make("delete", delete, "delete a topic and its messages", _DELETE)
    _add_topic(deleting, "topic")
    add_yes(deleting)
    add_watch(listing, describing)
    for each in (creating, listing, describing, altering, trimming, reading, deleting):
        add_connection(each)


def _add_topic(parser: argparse.ArgumentParser, kind: str = "") -> None:
    completes(parser.add_argument("topic", metavar="NAME", help="the topic's name"), kind)


def _add_query(parser: argparse.ArgumentParser) -> None:
    """Add the four kinds of content query."""
    query = parser.add_argument_group("which messages a virtual topic shows").add_mutually_exclusive_group()
    query.add_argument(
        "--where-exact", metavar="JSON", type=json_value, default=argparse.SUPPRESS, help="values that equal this one"
    )
    query.add_argument(
        "--where-partial",
        metavar="JSON",
        type=json_value,
        default=argparse.SUPPRESS,
        help="objects that contain the members of this one",
    )
    query.add_argument(
        "--where-regex",
        metavar="PATTERN",
        default=argparse.SUPPRESS,
        help="values in which this regular expression (RE2) is found",
    )
    query.add_argument(
        "--where-jsonpath",
        metavar="PATH",
        default=argparse.SUPPRESS,
        help="values of which this JSONPath (RFC 9535) selects something",
    )


def _view_query(given: argparse.Namespace) -> dict[str, Any]:
    """Return the content query that the user gave, if any."""
    prefix = "where_"
    return {name.removeprefix(prefix): query for name, query in vars(given).items() if name.startswith(prefix)}


def _check_create(given: argparse.Namespace) -> str | None:
    """Return why the arguments contradict each other, if they do."""
    settings, query = given_settings(given), _view_query(given)
    if query and "view_query" in settings:
        return "give --view-query, or one of the options --where-..., not both"
    if query and settings.get("view_of") is None:
        return "--where-... needs --view-of: the topic whose messages are filtered"
    if settings.get("view_of") is not None and not query and settings.get("view_query") is None:
        return "--view-of needs one of --where-exact, --where-partial, --where-regex and --where-jsonpath"
    return None


def _add_trim(parser: argparse.ArgumentParser) -> None:
    bound = parser.add_mutually_exclusive_group(required=True)
    bound.add_argument("--before-offset", metavar="N", type=count, help="remove messages before this offset")
    bound.add_argument(
        "--before-time",
        metavar="TIME",
        type=relative_moment,
        help="remove messages before the first one of this time or later",
    )
    parser.add_argument(
        "--partition",
        dest="partitions",
        metavar="N",
        type=count,
        action="append",
        help="only in this partition; may be repeated",
    )
    parser.add_argument("--unread", action="store_true", help="also remove messages that are not read yet")
    add_yes(parser)


def _add_history(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY", help="the key, such as the id of an aggregate")
    parser.add_argument("--start-version", metavar="N", type=count, default=0, help="begin with this version")
    parser.add_argument("-n", "--limit", metavar="N", type=count, help="end after this many messages")
    parser.add_argument(
        "--values", action="store_true", help="print only the values, unchanged, each followed by a newline"
    )


def _check_alter(given: argparse.Namespace) -> str | None:
    """Return why the arguments are incomplete, if they are."""
    return None if given_settings(given) else "give at least one setting to change"


def create(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Make a topic."""
    settings = given_settings(given)
    if query := _view_query(given):
        settings["view_query"] = query
    with connected(given, out) as bus:
        info = bus.create_topic(given.topic, exist_ok=given.exist_ok, **settings)
    out.tell(topic_content(info), f"topic {info.topic}: {_summary(info)}")
    return 0


def list_topics(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print topics, one per line."""
    with connected(given, out) as bus:
        topics = sorted(bus.topics(given.pattern), key=lambda info: info.topic)
    if not given.all and SYSTEM_PREFIX not in given.pattern:
        topics = [info for info in topics if not parse_topic(info.topic).topic.startswith(SYSTEM_PREFIX)]
    if out.json:
        for info in topics:
            content = topic_content(info)
            del content["partitions"], content["groups"]  # a list does not contain them
            out.tell(content)
        return 0
    if given.names:
        lines = [info.topic for info in topics]
    else:
        lines = table(("topic", "partitions", "storage", "kept", "durability"), *map(_row, topics)) if topics else []
        if not topics:
            out.note("there are no topics" if given.pattern == "*" else f"no topic is called {given.pattern}")
    out.tell({}, *lines)
    for info in topics:
        if info.error:
            out.note(f"topic {info.topic} could not be opened: {info.error}")
    return 0


def describe(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print a topic's settings and partitions."""
    with connected(given, out) as bus:
        info = bus.describe_topic(given.topic)
    out.tell(topic_content(info), *_description(info))
    return 0


def alter(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Change settings of a topic."""
    changes = given_settings(given)
    with connected(given, out) as bus:
        info = bus.alter_topic(given.topic, **changes)
    now = ", ".join(f"{name} {setting_text(name, info.settings[name])}" for name in changes)
    out.tell(topic_content(info), f"topic {info.topic}: {now}")
    return 0


def trim(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Remove old messages of a topic, if the user confirms."""
    with connected(given, out) as bus:
        info = bus.describe_topic(given.topic)
        offsets = _trim_offsets(given, info, bus)
        before = {each.partition: each.first_offset for each in info.partitions}
        messages = sum(max(offset - before.get(number, 0), 0) for number, offset in offsets.items())
        if not confirmed(given, f"Remove up to {counted(messages, 'message')} of topic {info.topic}?"):
            out.note("nothing was removed")
            return EXIT_ERROR
        first = bus.trim_topic(given.topic, offsets, unread=given.unread)
    if any(first[number] < min(offset, _end(info, number)) for number, offset in offsets.items()):
        out.note("messages that are not read yet were kept; --unread removes them too")
    gone = sum(max(offset - before[number], 0) for number, offset in first.items())
    content = {"topic": info.topic, "removed": gone, "first_offsets": {str(at): first[at] for at in sorted(first)}}
    out.tell(content, f"removed {counted(gone, 'message')} of topic {info.topic}")
    return 0


def _trim_offsets(given: argparse.Namespace, info: TopicInfo, bus: "Bus") -> dict[int, int]:
    """Return the partitions to trim, mapped to the first offset that stays."""
    if given.before_time is not None:
        return bus.offsets(given.topic, given.before_time, partitions=given.partitions)
    if given.partitions is None and len(info.partitions) > 1:
        given.parser.error(f"{info.topic} has {len(info.partitions)} partitions: say which with --partition")
    return dict.fromkeys(given.partitions or [0], given.before_offset)


def _end(info: TopicInfo, number: int) -> int:
    return info.partitions[number].next_offset


def history(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the messages of one key."""
    with connected(given, out) as bus:
        events = bus.history(given.topic, os.fsencode(given.key), start_version=given.start_version)
        for event in islice(events, given.limit):
            if out.full:
                out.flush()
            out.add(_event_line(given, out, event))
        out.flush()
    return 0


def _event_line(given: argparse.Namespace, out: Output, event: "Received") -> bytes:
    if given.values:
        return (event.value or b"") + b"\n"
    if out.json:
        return b'{"version":%d,"partition":%d,' % (event.version or 0, event.partition) + as_json(event)[1:]
    return b"%d\t%d:" % (event.version or 0, event.partition) + as_text(event)


def delete(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Delete a topic, if the user confirms."""
    with connected(given, out) as bus:
        info = bus.describe_topic(given.topic)
        messages = sum(partition.next_offset - partition.first_offset for partition in info.partitions)
        if not confirmed(given, f"Delete topic {info.topic} with {counted(messages, 'message')}?"):
            out.note("nothing was deleted")
            return EXIT_ERROR
        bus.delete_topic(given.topic)
    out.tell({"deleted": info.topic}, f"deleted topic {info.topic}")
    return 0


def topic_content(info: TopicInfo) -> dict[str, Any]:
    """Return a topic for JSON output, empty fields included."""
    return {field: msgspec.to_builtins(getattr(info, field)) for field in info.__struct_fields__}


def _summary(info: TopicInfo) -> str:
    partitions, storage, kept, durability = _row(info)[1:]
    if view_of := info.settings.get("view_of"):
        return f"view of {view_of} where {query_text(info.settings)}, {counted(partitions, 'partition')}"
    where = {"disk": "on disk", "memory": "in memory"}.get(storage, f"({storage})")
    return f"{counted(partitions, 'partition')} {where}, kept {kept}, durability {durability}"


def _row(info: TopicInfo) -> tuple[str, int, str, str, str]:
    chosen = info.settings
    if view_of := chosen.get("view_of"):
        return info.topic, chosen["partitions"], "view", f"as {view_of}", chosen["durability"]
    return info.topic, chosen["partitions"], chosen["storage"], _kept(chosen), chosen["durability"]


def _kept(chosen: dict[str, Any]) -> str:
    """Format the retention of a topic."""
    words = []
    if chosen["validity"] == "ttl":
        words.append(f"for {duration_text(chosen['ttl_seconds'])}")
    if chosen["validity"] == "until_consumed":
        words.append("until consumed")
    if chosen.get("retain_seconds") is not None:
        words.append(f"for {duration_text(chosen['retain_seconds'])}")
    if chosen.get("retain_bytes") is not None:
        words.append(f"up to {size_text(chosen['retain_bytes'])}")
    if chosen["compact_by_key"]:
        words.append("last of each key")
    if chosen["storage"] == "memory":
        words.append(f"up to {size_text(chosen['memory_bytes'])}")
    return ", ".join(words) or "for ever"


def query_text(settings: dict[str, Any]) -> str:
    """Format the content query of a virtual topic.

    >>> query_text({"view_query": {"jsonpath": "$.a"}})
    'jsonpath $.a'
    """
    [(kind, argument)] = settings["view_query"].items()
    return f"{kind} {argument if kind in ('regex', 'jsonpath') else json.dumps(argument, ensure_ascii=False)}"


def _description(info: TopicInfo) -> Iterator[str]:
    yield f"topic    {info.topic}"
    yield f"created  {time_text(info.created_us)}"
    if view_of := info.settings.get("view_of"):
        yield f"view of  {view_of}"
        yield f"where    {query_text(info.settings)}"
    if info.view_failed:
        told = f"{counted(info.view_failed, 'message')}, for which the query takes too long"
        yield f"left out {paint(told, 'bad')}"
    if info.views:
        yield f"views    {', '.join(info.views)}"
    yield f"kept     {_kept(info.settings)}"
    yield f"groups   {', '.join(info.groups) or 'none'}"
    if info.error:
        yield f"error    {paint(info.error, 'bad')}"
    yield ""
    yield from table(("setting", "value"), *((name, setting_text(name, it)) for name, it in info.settings.items()))
    yield ""
    rows = [
        (each.partition, each.first_offset, each.next_offset, each.next_offset - each.first_offset, each.bytes)
        for each in info.partitions
    ]
    yield from table(("partition", "first offset", "next offset", "messages", "bytes"), *rows)
    damaged = [(each.partition, *found) for each in info.partitions for found in each.damaged]
    if damaged:
        yield ""
        yield from (f"damaged  partition {number}: {offsets_text(*found)}" for number, *found in damaged)
