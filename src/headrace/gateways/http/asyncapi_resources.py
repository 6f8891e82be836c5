"""The AsyncAPI document and its page, made of what the session may see."""

import asyncio
import re
from contextlib import suppress
from typing import Annotated

import msgspec

from headrace.gateways.http.asyncapi import AsyncApiDocument, ServerAddresses, ServiceIndex, TopicServices
from headrace.gateways.http.asyncapi_page import PAGE_BYTES_MAX, PAGE_TOPICS, page_parts
from headrace.gateways.http.call import Call, Reply
from headrace.gateways.http.docs_page import CONTENT_POLICY
from headrace.gateways.http.host_guard import host_name
from headrace.model.errors import HeadraceError, ServiceNotFound
from headrace.model.limits import ASYNCAPI_SERVICES_MAX, ASYNCAPI_TOPICS_MAX
from headrace.model.requests import Info, TopicInfo, TopicList
from headrace.model.service_requests import ServiceDescribe, ServiceList

_SLICE = 32
"""Topics or services between two turns of the loop."""
_NOT_ALLOWED = "forbidden"
"""The code of the error for what a session may not see: the document leaves it out."""
_NATIVE_URL = re.compile(r"(headraces?)://([^/]+)")
_NO_SERVICES = TopicServices()


class AsyncApiQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which topics."""

    topics: str = "*"
    """A pattern of names: `*` stands for any characters, `?` for one."""
    after: str = ""
    """Only topics with later names: what `x-headrace-next` of the document before said."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=ASYNCAPI_TOPICS_MAX)] | None = None
    """How many topics at most."""


async def serve_asyncapi(call: Call) -> Reply:
    """Answer the AsyncAPI document of the session's topics and services."""
    query = call.query(AsyncApiQuery)
    document = AsyncApiDocument(_version(call), await _addresses(call))
    await _fill(call, document, query, query.limit or ASYNCAPI_TOPICS_MAX)
    return Reply(200, await _encoded(document))


async def serve_asyncapi_page(call: Call) -> Reply:
    """Answer the same as a page for people, with fewer topics."""
    query = call.query(AsyncApiQuery)
    document = AsyncApiDocument(_version(call), await _addresses(call), PAGE_BYTES_MAX)
    await _fill(call, document, query, min(query.limit or PAGE_TOPICS, PAGE_TOPICS))
    told = msgspec.json.decode(await _encoded(document))
    parts: list[str] = []
    for number, part in enumerate(page_parts(told, query.topics, query.after), 1):
        parts.append(part)
        if not number % (4 * _SLICE):
            await asyncio.sleep(0)
    policy = (b"content-security-policy", CONTENT_POLICY)
    return Reply(200, "".join(parts).encode(), b"text/html; charset=utf-8", (policy,))


async def _fill(call: Call, document: AsyncApiDocument, query: AsyncApiQuery, limit: int) -> None:
    """Add topics and subjects in slices, until the document is full."""
    found: list[TopicInfo] = (await call.ask(TopicList(query.topics))).topics
    services = await _services(call)
    await asyncio.sleep(0)
    topics = sorted((one for one in found if one.topic > query.after), key=lambda one: one.topic)
    last = ""
    for number, topic in enumerate(topics):
        if number == limit or document.is_full:
            document.next = last
            break
        document.add_topic(topic, services.topics.get(topic.topic, _NO_SERVICES))
        last = topic.topic
        if not number % _SLICE or topic.settings.get("middleware"):
            await asyncio.sleep(0)
    if query.after or query.topics != "*":
        return  # the first document of all topics has the subjects
    for number, subject in enumerate(sorted(services.subjects)):
        if document.is_full:
            break
        document.add_subject(subject, services.subjects[subject])
        if not number % _SLICE:
            await asyncio.sleep(0)


async def _encoded(document: AsyncApiDocument) -> bytes:
    parts = []
    for part in document.parts():
        parts.append(part)
        await asyncio.sleep(0)
    return b"".join(parts)


async def _services(call: Call) -> ServiceIndex:
    """The registered services with their schemas; none if the session may not see them."""
    index, after, count = ServiceIndex(), "", 0
    try:
        while count < ASYNCAPI_SERVICES_MAX:
            found = await call.ask(ServiceList(after=after))
            for one in found.services[: ASYNCAPI_SERVICES_MAX - count]:
                with suppress(ServiceNotFound):  # it has gone meanwhile
                    index.add(await call.ask(ServiceDescribe(one.name)))
                count += 1
                if not count % _SLICE:
                    await asyncio.sleep(0)
            after = found.next
            if not after:
                break
    except HeadraceError as error:
        if error.code != _NOT_ALLOWED:
            raise
    return index


async def _addresses(call: Call) -> ServerAddresses:
    """Where clients reach this broker: by the name that this one used, and at the addresses of the native protocol."""
    host = call.headers.get(b"host", b"")
    http = host.decode("ascii") if host_name(host) else ""
    try:
        listening = (await call.ask(Info())).listening
    except HeadraceError as error:
        if error.code != _NOT_ALLOWED:
            raise
        listening = []
    native = tuple((found[1], found[2]) for url in listening if (found := _NATIVE_URL.match(url)))
    has_tls = call.connection.scheme == "https"
    return ServerAddresses(http, has_tls, call.gateway.application.upgrade_paths.get("websocket", ""), native)


def _version(call: Call) -> str:
    return call.gateway.settings.server.rpartition(" ")[2]
