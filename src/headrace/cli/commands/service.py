"""`headrace service`: list and describe registered services, their errors, and the policy about them."""

import argparse
from collections.abc import Iterator

import msgspec

from headrace.cli.arguments import command_maker, count
from headrace.cli.connection import add_connection, connected
from headrace.cli.message_formats import time_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, table
from headrace.cli.terminal.watch import add_watch
from headrace.model.service_requests import ErrorSummary, ServiceError, ServiceInfo

_LIST = """\
examples:
  headrace service list
  headrace service list --consumes orders
  headrace service list --serves price.quote --json

Services register themselves; an instance that gives no sign of life for its time to
live is forgotten.
"""

_DESCRIBE = """\
example:
  headrace service describe billing

Prints the instances of a service, its topics and subjects, and for which of them it
has told a JSON Schema; --json prints the schemas.
"""

_ERRORS = """\
examples:
  headrace service errors
  headrace service errors billing --last 3
  headrace tail headrace.errors --from '1h ago' --values

Counts the errors since the broker was started, by service and code, and prints the
newest. All errors that services have reported are in the topic headrace.errors.
"""

_POLICY = """\
examples:
  headrace service policy
  headrace service policy --require-registration on

With --require-registration on, the broker refuses all that clients of the tenant ask
for that are no registered service, with the code not_registered. They may still look
at the bus and register, and on the broker's machine administer it. The broker
remembers the policy.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace service`."""
    parser.epilog = "`headrace service COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    listing = make("list", list_services, "list registered services", _LIST)
    listing.add_argument("--produces", metavar="TOPIC", default="", help="only services that publish to this topic")
    listing.add_argument("--consumes", metavar="TOPIC", default="", help="only services that read this topic")
    listing.add_argument("--serves", metavar="SUBJECT", default="", help="only services that answer requests on it")
    listing.add_argument("--names", action="store_true", help="print only the names")
    describing = make("describe", describe, "print what a service says of itself", _DESCRIBE)
    describing.add_argument("service", metavar="NAME", help="the service's name")
    failing = make("errors", show_errors, "print the errors of services", _ERRORS)
    failing.add_argument("service", metavar="NAME", nargs="?", default="", help="only this service")
    failing.add_argument("--last", metavar="N", type=count, default=10, help="newest errors to print (default: 10)")
    ruling = make("policy", policy, "print or set who may use the bus", _POLICY)
    ruling.add_argument("--require-registration", choices=("on", "off"), help="whether clients must be registered")
    add_watch(listing, describing, failing)
    for each in (listing, describing, failing, ruling):
        add_connection(each)


def list_services(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print services, one per line."""
    with connected(given, out) as bus:
        found = bus.services.find(produces=given.produces, consumes=given.consumes, serves=given.serves)
    if out.json:
        for info in found:
            out.tell(_content(info))
        return 0
    if given.names:
        out.tell({}, *(info.name for info in found))
        return 0
    if not found:
        out.note(
            "no service is registered" + (" that matches" if given.produces or given.consumes or given.serves else "")
        )
        return 0
    out.tell({}, *table(("service", "version", "instances", "consumes", "produces", "errors"), *map(_row, found)))
    return 0


def describe(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print a service and its instances."""
    with connected(given, out) as bus:
        info = bus.services.describe(given.service)
    out.tell(_content(info), *_description(info))
    return 0


def show_errors(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print counts of errors by service and code, and the newest errors."""
    with connected(given, out) as bus:
        found = bus.services.errors(given.service, last=given.last)
    if out.json:
        for summary in found:
            out.tell(msgspec.to_builtins(summary))
        return 0
    if not found:
        out.note(f"no errors of {given.service or 'services'} since the broker was started")
        return 0
    rows = [(_named(one), code, number) for one in found for code, number in sorted(one.codes.items())]
    out.tell({}, *table(("service", "code", "count"), *rows))
    for summary in found:
        for error in summary.last:
            out.tell({}, "", *_error_lines(summary, error))
    return 0


def policy(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the policy, after it is set if the user says so."""
    with connected(given, out) as bus:
        if given.require_registration is not None:
            bus.services.require_registration(given.require_registration == "on")
        required = bus.services.is_registration_required()
    who = "only registered services may use the bus" if required else "everybody may use the bus"
    out.tell({"require_registration": required}, f"registration is {'required' if required else 'optional'}: {who}")
    return 0


def _content(info: ServiceInfo) -> dict[str, object]:
    content: dict[str, object] = {
        "name": info.name,
        "instances": [msgspec.structs.asdict(one) for one in info.instances],
    }
    for field in ("produces", "consumes", "serves", "schemas", "errors", "instances_total", "truncated"):
        content[field] = getattr(info, field)
    return content


def _row(info: ServiceInfo) -> tuple[object, ...]:
    return (
        info.name,
        ", ".join(_versions(info)) or "-",
        info.instances_total,
        ", ".join(info.consumes) or "-",
        ", ".join(info.produces) or "-",
        info.errors,
    )


def _versions(info: ServiceInfo) -> list[str]:
    return sorted({one.version for one in info.instances if one.version})


def _description(info: ServiceInfo) -> Iterator[str]:
    yield f"service   {info.name}"
    for field in ("produces", "consumes", "serves"):
        yield f"{field:8}  {', '.join(getattr(info, field)) or 'none'}"
    yield f"schemas   {', '.join(sorted(info.schemas)) or 'none'}"
    yield f"errors    {info.errors:,}"
    rows = [
        (
            one.instance,
            one.version or "-",
            one.client,
            "connected" if one.connected else "gone",
            time_text(one.registered_us),
            ", ".join(f"{name}={content}" for name, content in sorted(one.metadata.items())) or "-",
        )
        for one in info.instances
    ]
    yield ""
    yield from table(("instance", "version", "client", "state", "registered", "metadata"), *rows)
    if info.truncated:
        yield f"({len(info.instances):,} of {info.instances_total:,} instances; there is more than fits here)"


def _named(summary: ErrorSummary) -> str:
    return summary.service or "-"


def _error_lines(summary: ErrorSummary, error: ServiceError) -> Iterator[str]:
    where = f" {error.topic}[{error.partition}] offset {error.offset}" if error.topic else f" {error.subject}".rstrip()
    yield f"{time_text(error.time_us)}  {_named(summary)}  {error.code}{where}"
    yield f"    {error.message}"
