"""The AsyncAPI 3 document: a channel for each topic and each subject that a service answers, and their operations.

Operations are those of a client of the broker: it sends what it publishes, and receives what it reads.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from headrace.gateways.http.asyncapi_schemas import embedded_schema
from headrace.model.limits import ASYNCAPI_BYTES_MAX
from headrace.model.requests import TopicInfo
from headrace.model.service_requests import ServiceInfo

ASYNCAPI_VERSION = "3.0.0"
NEXT_FIELD = "x-headrace-next"
"""The field of `info` that says with which `after` the next document goes on."""
_JSON = "application/json"
_NO_IDENTIFIER = re.compile(r"[^A-Za-z0-9._-]")
_REPLIES = "replies"
_MEMBERS_TOGETHER = 512
_DESCRIPTION = """\
The topics of this broker, and the subjects on which its services answer requests. Operations are those of a client: it
sends what it publishes, and receives what it reads. Over HTTP, `x-headrace-http` has the method and the path.
"""
_encode = msgspec.json.Encoder().encode
Part = dict[str, Any]


class ServerAddresses(NamedTuple):
    """Where clients reach the broker; empty where they cannot."""

    http: str
    """Host and port."""
    has_tls: bool = False
    """Whether HTTP is encrypted there."""
    websocket_path: str = ""
    native: tuple[tuple[str, str], ...] = ()
    """Scheme, and host and port, of the native protocol."""


class AsyncApiDocument:
    """Gathers a document: its members are encoded as they are added, so that no step of it takes long."""

    def __init__(self, version: str, addresses: ServerAddresses, bytes_max: int = ASYNCAPI_BYTES_MAX) -> None:
        self._version = version
        self._addresses = addresses
        self._bytes_max = bytes_max
        self._channels: dict[str, bytes] = {}
        self._operations: dict[str, bytes] = {}
        self._schemas: dict[str, bytes] = {}
        self._identifiers: dict[str, int] = {}
        """How often each was asked for."""
        self._bytes = 0
        self.next = ""
        """The topic behind which the next document goes on; empty if there is none."""

    @property
    def is_full(self) -> bool:
        """Whether nothing more is to be added."""
        return self._bytes >= self._bytes_max

    def add_topic(self, topic: TopicInfo, services: "TopicServices") -> None:
        """Add the channel of a topic, and the operations that publish to it and read it."""
        name, settings = topic.topic, topic.settings
        channel = self._identifier(f"topic.{name}")
        schemas = {"message": schema} if (schema := topic_schema(settings)) is not None else services.schemas
        messages = {message: self._message(name, f"{channel}.{message}", one) for message, one in schemas.items()}
        messages = messages or {"message": {"name": name}}
        told: Part = {"address": _address(name), "title": name, "messages": messages}
        if settings.get("view_of"):
            told["description"] = f"A view of the topic {settings['view_of']}, which filters its messages"
        told["x-headrace-partitions"] = settings.get("partitions", 1)
        self._add(self._channels, channel, told)
        path = f"/v1/topics/{quote(name, safe='')}/messages"
        if not settings.get("view_of"):
            send = self._operation("send", channel, f"Publish to {name}", "POST", path, services.producers)
            self._add(self._operations, f"send.{channel}", send)
        receive = self._operation("receive", channel, f"Read {name}", "GET", path, services.consumers)
        self._add(self._operations, f"receive.{channel}", receive)

    def add_subject(self, subject: str, services: "TopicServices") -> None:
        """Add the channel of a subject on which services answer, and the operation that asks them."""
        channel = self._identifier(f"subject.{subject}")
        messages = {name: self._message(subject, f"{channel}.{name}", one) for name, one in services.schemas.items()}
        messages = messages or {"request": {"name": subject}}
        self._add(self._channels, channel, {"address": _address(subject), "title": subject, "messages": messages})
        if _REPLIES not in self._channels:
            replies = {"address": None, "title": "Replies", "messages": {"reply": {"name": "reply"}}}
            self._add(self._channels, _REPLIES, {**replies, "description": "An inbox of the client that asks"})
        path = f"/v1/requests/{quote(subject, safe='')}"
        request = self._operation("send", channel, f"Ask {subject}", "POST", path, services.consumers)
        request["reply"] = {"channel": {"$ref": f"#/channels/{_REPLIES}"}}
        self._add(self._operations, f"request.{channel}", request)

    def parts(self) -> Iterator[bytes]:
        """The document as JSON, in parts."""
        info: Part = {"title": "Headrace", "version": self._version, "description": " ".join(_DESCRIPTION.split())}
        if self.next:
            info[NEXT_FIELD] = self.next
        head = {
            "asyncapi": ASYNCAPI_VERSION,
            "info": info,
            "defaultContentType": _JSON,
            "servers": self._servers(),
        }
        yield _encode(head)[:-1]
        for opening, members in (
            (b',"channels":{', self._channels),
            (b'},"operations":{', self._operations),
            (b'},"components":{"schemas":{', self._schemas),
        ):
            yield opening
            yield from _members(members)
        yield b"}}}"

    def _servers(self) -> Part:
        http, has_tls, websocket_path, native = self._addresses
        servers: Part = {}
        if http:
            servers["http"] = {"host": http, "protocol": "https" if has_tls else "http"}
        if http and websocket_path:
            servers["ws"] = {"host": http, "pathname": websocket_path, "protocol": "wss" if has_tls else "ws"}
        for number, (scheme, host) in enumerate(native, 1):
            name = "native" if number == 1 else f"native{number}"
            servers[name] = {"host": host, "protocol": scheme, "description": "The native protocol"}
        return servers

    def _message(self, name: str, identifier: str, schema: Any) -> Part:
        """A message whose schema is a component."""
        identifier = self._identifier(f"schema.{identifier}").removeprefix("schema.")
        place = f"#/components/schemas/{identifier}"
        self._add(self._schemas, identifier, embedded_schema(schema, place))
        return {"name": name, "contentType": _JSON, "payload": {"$ref": place}}

    def _operation(
        self, action: str, channel: str, title: str, method: str, path: str, services: Iterable[str]
    ) -> Part:
        told: Part = {
            "action": action,
            "channel": {"$ref": f"#/channels/{channel}"},
            "title": title,
            "bindings": {"http": {"method": method, "bindingVersion": "0.3.0"}},
            "x-headrace-http": {"method": method, "path": path},
        }
        tags = [{"name": name} for name in sorted(services)]
        return {**told, "tags": tags} if tags else told

    def _identifier(self, text: str) -> str:
        """A key of a member, unique and with no other characters than a reference may have."""
        plain = _NO_IDENTIFIER.sub(lambda found: f"_{ord(found[0]):x}", text)
        number = self._identifiers.get(plain, 0) + 1
        self._identifiers[plain] = number
        return plain if number == 1 else self._identifier(f"{plain}_{number}")

    def _add(self, members: dict[str, bytes], name: str, told: Part) -> None:
        members[name] = encoded = _encode(told)
        self._bytes += len(name) + len(encoded)


class TopicServices:
    """What registered services say of a topic, or of a subject."""

    __slots__ = ("consumers", "producers", "schemas")

    def __init__(self) -> None:
        self.producers: set[str] = set()
        self.consumers: set[str] = set()
        """Services that read it, or that answer on it."""
        self.schemas: dict[str, Any] = {}
        """By service."""


class ServiceIndex:
    """Registered services by topic and by subject."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicServices] = {}
        self.subjects: dict[str, TopicServices] = {}

    def add(self, service: ServiceInfo) -> None:
        """Add what a service says of itself."""
        for topic in service.produces:
            self._of(self.topics, topic).producers.add(service.name)
        for topic in service.consumes:
            self._of(self.topics, topic).consumers.add(service.name)
        for subject in service.serves:
            self._of(self.subjects, subject).consumers.add(service.name)
        name = _NO_IDENTIFIER.sub("_", service.name)
        for about, schema in service.schemas.items():
            for known in (self.topics, self.subjects):
                if about in known:
                    known[about].schemas[name] = schema

    @staticmethod
    def _of(known: dict[str, TopicServices], name: str) -> TopicServices:
        found = known.get(name)
        if found is None:
            found = known[name] = TopicServices()
        return found


def topic_schema(settings: dict[str, Any]) -> Any:
    """The JSON Schema that the messages of a topic follow, by its middleware; None if there is none."""
    schemas = [one["schema"] for one in settings.get("middleware", ()) if one.get("name") == "schema"]
    if not schemas:
        return None
    return schemas[0] if len(schemas) == 1 else {"allOf": schemas}


def _address(name: str) -> str:
    """A name as an address, in which braces would mean a parameter."""
    return name.replace("{", "%7B").replace("}", "%7D")


def _members(encoded: dict[str, bytes]) -> Iterator[bytes]:
    """The members of an object, some at a time."""
    members = iter(encoded.items())
    separator = b""
    while some := list(islice(members, _MEMBERS_TOGETHER)):
        yield separator + b",".join(b'"%b":%b' % (name.encode(), part) for name, part in some)
        separator = b","
