"""`headrace group`: list, describe, seek and delete consumer groups."""

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.cli.arguments import command_maker, completes, count, start
from headrace.cli.connection import add_connection, add_yes, confirmed, connected
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import EXIT_ERROR, Output, counted, table
from headrace.cli.terminal.watch import add_watch
from headrace.model.requests import GroupInfo

_LIST = """\
examples:
  headrace group list
  headrace group list --json

The lag is the number of messages that a group has not read yet.
"""

_DESCRIBE = """\
example:
  headrace group describe billing --json
"""

_SEEK = """\
examples:
  headrace group seek billing orders --to earliest
  headrace group seek billing orders --to '2h ago'
  headrace group seek billing orders --to 1000 --partition 3

--to takes an offset, earliest, latest, or a time: ISO 8601 (UTC if it names no
zone), or '5m ago'. Running members continue from there.
"""

_DELETE = """\
example:
  headrace group delete billing --yes

Deletes the group and its positions, but no messages. The group must have no
members. Asks for confirmation on a terminal; otherwise it needs --yes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace group`."""
    parser.epilog = "`headrace group COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    listing = make("list", list_groups, "list groups and their lag", _LIST)
    listing.add_argument("--names", action="store_true", help="print only the names")
    describing = make("describe", describe, "print members and positions of a group", _DESCRIBE)
    _add_group(describing)
    seeking = make("seek", seek, "move a group to another position in a topic", _SEEK)
    _add_group(seeking)
    completes(seeking.add_argument("topic", metavar="TOPIC", help="the topic's name"), "topic")
    seeking.add_argument("--to", metavar="WHERE", type=start, required=True, help="the new position, see below")
    seeking.add_argument(
        "--partition",
        dest="partitions",
        metavar="N",
        type=count,
        action="append",
        help="only this partition; may be repeated",
    )
    deleting = make("delete", delete, "delete a group and its positions", _DELETE)
    _add_group(deleting)
    add_yes(deleting)
    add_watch(listing, describing)
    for each in (listing, describing, seeking, deleting):
        add_connection(each)


def _add_group(parser: argparse.ArgumentParser) -> None:
    completes(parser.add_argument("group", metavar="GROUP", help="the group's name"), "group")


def list_groups(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print groups, one per line."""
    with connected(given, out) as bus:
        groups = sorted(bus.groups(), key=lambda each: each.group)
    if out.json:
        for each in groups:
            out.tell(msgspec.to_builtins(each))
        return 0
    if given.names:
        lines = [each.group for each in groups]
    else:
        rows = [(each.group, each.members, each.lag, ", ".join(each.topics)) for each in groups]
        lines = table(("group", "members", "lag", "topics"), *rows) if groups else []
        if not groups:
            out.note("there are no groups")
    out.tell({}, *lines)
    return 0


def describe(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print a group's members and positions."""
    with connected(given, out) as bus:
        info = bus.describe_group(given.group)
    out.tell(_content(info), *_description(info))
    return 0


def seek(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Move a group."""
    with connected(given, out) as bus:
        info = bus.seek_group(given.group, given.topic, to=given.to, partitions=given.partitions)
    out.tell(_content(info), *_description(info))
    return 0


def delete(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Delete a group, if the user confirms."""
    with connected(given, out) as bus:
        info = bus.describe_group(given.group)
        if not confirmed(
            given, f"Delete group {info.group} with its positions in {counted(len(info.places), 'partition')}?"
        ):
            out.note("nothing was deleted")
            return EXIT_ERROR
        bus.delete_group(given.group)
    out.tell({"deleted": info.group}, f"deleted group {info.group}")
    return 0


def _content(info: GroupInfo) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.to_builtins(info)
    for place in content["places"]:
        place.setdefault("member", None)
    return content


def _description(info: GroupInfo) -> Iterator[str]:
    yield f"group    {info.group}"
    yield f"members  {len(info.members) or 'none'}"
    yield f"lag      {sum(place.lag for place in info.places):,}"
    if not info.places:
        return
    yield ""
    rows = [
        (
            each.topic,
            each.partition,
            each.offset,
            each.end_offset if not each.error else "?",
            each.lag if not each.error else "?",
            _member_text(info, each.member) if not each.error else each.error,
        )
        for each in sorted(info.places, key=lambda place: (place.topic, place.partition))
    ]
    yield from table(("topic", "partition", "offset", "end offset", "lag", "member"), *rows)


def _member_text(info: GroupInfo, member: str) -> str:
    name = info.members.get(member, "")
    if member.startswith(name):  # the ids of Python clients begin with the client's name
        return member or "-"
    return f"{name} ({member})"
