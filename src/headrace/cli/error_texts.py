"""Error texts that name command-line options where the Python API's texts would not help."""

import argparse
import json
import shlex
from typing import Any

from headrace.cli.near_names import near_names
from headrace.model.errors import (
    CorruptBatch,
    DiskFull,
    GroupInUse,
    GroupNotFound,
    HeadraceError,
    LogInUse,
    LogNotFound,
    LogOwned,
    MessageLeased,
    NoResponders,
    NotOwner,
    RouteExists,
    ScheduleExists,
    ScheduleNotFound,
    ServiceFailed,
    StaleVersion,
    SubscriptionExists,
    SubscriptionNotFound,
    Timeout,
    TopicExists,
    TopicNotFound,
)


def explained(error: HeadraceError, given: argparse.Namespace) -> str:
    """Return what went wrong and what the user can do."""
    if getattr(given, "directory", None) is not None:
        return _about_log(error, given, given.directory)
    if isinstance(error, CorruptBatch) and "skip_corrupt" in given:
        advice: str | None = "--skip-corrupt skips damaged messages"
    else:
        advice = _advice(error, given)
    near = "" if _NEAREST in error.details else near_names(error, given)
    told = f"{error}; {near}" if near else str(error)
    return f"{told}{' ' if near else '; '}{advice}" if advice else told


def service_error(error: HeadraceError) -> dict[str, Any]:
    """Return code and details of the error of a handler, if it is one, as JSON can express them."""
    if not isinstance(error, ServiceFailed):
        return {}
    details = json.loads(json.dumps(error.error_details, default=str))
    return {"error_code": error.error_code, "error_details": details}


def _about_log(error: HeadraceError, given: argparse.Namespace, directory: str) -> str:
    if isinstance(error, CorruptBatch):
        return (
            f"messages {error.first_offset} to {error.next_offset - 1} are damaged ({error.path} at byte "
            f"{error.position}: {error.reason}); --offset {error.next_offset} continues after them, --skip-corrupt "
            "skips all damaged messages"
        )
    if isinstance(error, DiskFull):
        then = "append what is missing" if given.run.__name__ == "append" else "try again"
        return f"the disk of {directory} is full; free some space, then {then}"
    if isinstance(error, LogOwned):
        return _about_owned(given.run.__name__, directory, error.details.get("data"))
    if isinstance(error, LogInUse) and "broker" in str(error):
        return str(error)
    if isinstance(error, LogInUse):
        return f"{directory} is being written by another process; end that first, or try again"
    if isinstance(error, LogNotFound) and given.run.__name__ != "append":
        return f"{error}; to make one: headrace log append {shlex.quote(directory)} VALUE"
    return str(error)


def _about_owned(command: str, directory: str, data: str | None) -> str:
    """Return which commands replace `headrace log` in a broker's data directory."""
    if data is None:
        return (
            f"{directory} is a copy of a broker's log, and only the broker writes to such; `headrace publish TOPIC "
            "VALUE` publishes to its topic, `headrace log read` and `info` look at the copy"
        )
    shown = shlex.quote(data)
    advice = {
        "append": "`headrace publish TOPIC VALUE` publishes to its topics",
        "read": "`headrace tail TOPIC --from earliest --no-follow` prints messages of its topics",
        "tail": "`headrace tail TOPIC` prints messages of its topics",
        "info": "`headrace topic list` and `headrace topic describe TOPIC` tell about its topics",
        "verify": f"`headrace verify {shown}` checks all of it",
        "repair": f"`headrace repair {shown}` repairs all of it while the broker is stopped",
        "bench": "give another directory",
    }[command]
    where = "is the data directory of a broker" if data == directory else f"belongs to the broker of {data}"
    return f"{directory} {where}; {advice}"


_ADVICE: dict[type[HeadraceError], str] = {
    TopicExists: "--exist-ok takes it as it is, headrace topic alter changes it",
    GroupNotFound: "headrace group list shows those there are",
    GroupInUse: "headrace group describe shows them",
    SubscriptionNotFound: "headrace queue list shows those there are, headrace queue create makes one",
    SubscriptionExists: "--exist-ok takes it as it is, headrace queue alter changes it",
    StaleVersion: "headrace timeline show tells what it is now",
    MessageLeased: "headrace timeline show tells who has it, and until when",
    NotOwner: "--owner says in whose name",
    ScheduleNotFound: "headrace cron list shows those there are",
    ScheduleExists: "--replace puts the new one in its place",
    RouteExists: "--replace puts the new one in its place",
    NoResponders: "headrace respond starts one",
}
"""What a user can do, by error code, where the error's text does not say it."""


_IN_USE = {
    "serve": "end it first, or give another directory with --data; headrace info tells about the broker that runs",
    "repair": "end the broker first",
    "upgrade": "end it first",
}
"""What a user can do if the directory is in use, by command."""


_NEAREST = "nearest"
"""The key in the details of a broker's error that lists close names; such an error also says how to create the name."""
_OF_ARCHIVES = ("headrace archive ", "headrace sql")
"""Commands for which a topic may be missing outside the broker, as in a file."""


def _advice(error: HeadraceError, given: argparse.Namespace) -> str | None:
    if isinstance(error, TopicNotFound):
        if _NEAREST not in error.details and given.parser.prog.startswith(_OF_ARCHIVES):
            return None
        told = _NEAREST in error.details or given.parser.prog.startswith("headrace topic ")
        return f"headrace topic list shows those there are{'' if told else ', headrace topic create makes one'}"
    if isinstance(error, LogInUse):
        return None if "--node" in str(error) else _IN_USE.get(given.run.__name__)
    if isinstance(error, Timeout):
        return "--timeout waits longer" if "timeout" in given else None
    return _ADVICE.get(type(error))
