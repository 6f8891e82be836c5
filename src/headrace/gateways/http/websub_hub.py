"""The WebSub hub: where subscribers ask for the messages of a topic, and the links by which they find it."""

import re
from typing import Annotated, Literal
from urllib.parse import quote, unquote, urlsplit

import msgspec

from headrace.gateways.http.call import Call, Reply, json_reply, parse_fields, unsupported_type
from headrace.gateways.http.host_guard import host_name
from headrace.gateways.http.problems import HttpError
from headrace.gateways.http.route import Route
from headrace.model.arguments import shortened, shown
from headrace.model.receiver_url import URL_CHARACTERS_MAX, parse_receiver_url
from headrace.model.requests import TopicDescribe
from headrace.model.type_info import build_type_info
from headrace.model.websub import link_header, subscription_name
from headrace.model.websub_requests import WebSubAccepted, WebSubSubscribe, WebSubUnsubscribe

WEBSUB = "websub"
HUB_PATH = "/v1/hub"
FORM = "application/x-www-form-urlencoded"
_FORM_BYTES_MAX = 16 << 10
_LINKED_PATHS = ("/v1/topics/{topic}", "/v1/topics/{topic}/messages")
_TOPIC_PATH = re.compile(r"/v1/topics/([^/]+)(?:/messages)?")

_Url = Annotated[str, msgspec.Meta(max_length=URL_CHARACTERS_MAX)]


class HubRequest(msgspec.Struct):
    """What a subscriber asks for. Fields that the hub does not know are ignored, as WebSub wants it."""

    mode: Literal["subscribe", "unsubscribe", "publish"] = msgspec.field(name="hub.mode")
    """`publish` is answered, and has no effect: the hub knows what is published."""
    topic: _Url = msgspec.field(name="hub.topic", default="")
    """The URL of a topic of this broker, `http://HOST/v1/topics/TOPIC/messages`, as its header `Link` says."""
    callback: _Url = msgspec.field(name="hub.callback", default="")
    """The URL to which messages are sent, after it has confirmed that."""
    lease_seconds: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] | None = msgspec.field(
        name="hub.lease_seconds", default=None
    )
    """How long; the hub may grant less or more, and says so when it asks the callback."""
    secret: str = msgspec.field(name="hub.secret", default="")
    """Signs what is sent, in `X-Hub-Signature`; fewer than 200 bytes."""
    url: str = msgspec.field(name="hub.url", default="")
    """Instead of `hub.topic` when it is published."""


build_type_info(HubRequest)


async def answer_hub(call: Call) -> Reply:
    """Take a request of a subscriber, whose callback is asked afterwards."""
    form = _decode_form(call.media_type(), await call.read_body())
    topic = _topic_name(call, form.topic or (form.url if form.mode == "publish" else ""))
    if form.mode == "publish":
        await call.ask(TopicDescribe(topic))  # whether there is such a topic
        return json_reply(WebSubAccepted(), 202)
    if not form.callback:
        raise HttpError("invalid_field", "hub.callback is missing: the URL to which messages are to be sent")
    callback = parse_receiver_url(form.callback).text
    name = subscription_name(callback, form.topic)
    if form.mode == "unsubscribe":
        return json_reply(await call.ask(WebSubUnsubscribe(name)), 202)
    request = WebSubSubscribe(
        name, topic, callback, form.topic, _base_url(call) + HUB_PATH, form.lease_seconds, form.secret
    )
    return json_reply(await call.ask(request), 202)


def hub_links(call: Call) -> tuple[tuple[bytes, bytes], ...]:
    """The header Link of an answer about a topic, whose name is the parameter of the path; else nothing."""
    if call.route.path not in _LINKED_PATHS or not call.headers.get(b"host"):
        return ()
    base = _base_url(call)
    topic_url = f"{base}/v1/topics/{quote(call.parameters[0], safe='')}/messages"
    return ((b"link", link_header(base + HUB_PATH, topic_url).encode("ascii")),)


def _decode_form(media_type: bytes, body: bytes) -> HubRequest:
    if media_type != FORM.encode():
        raise unsupported_type(FORM.encode())
    if len(body) > _FORM_BYTES_MAX:
        raise HttpError("body_too_large", f"the form has {len(body)} bytes, and {_FORM_BYTES_MAX} are the most")
    try:
        return msgspec.convert(parse_fields(body, "the form"), HubRequest, strict=False)
    except msgspec.ValidationError as error:
        raise HttpError("invalid_field", f"the form is wrong: {shortened(error)}") from error


def _topic_name(call: Call, url: str) -> str:
    """The topic of a URL, if that is one of this broker."""
    wrong = HttpError(
        "invalid_field",
        f"hub.topic must be the URL of a topic of this broker, such as {_base_url(call)}/v1/topics/orders/messages, "
        f"not {shown(url)}",
    )
    try:
        parts = urlsplit(url)
        found = _TOPIC_PATH.fullmatch(parts.path)
        if parts.scheme not in ("http", "https") or found is None or parts.query or parts.fragment:
            raise wrong
        if not _is_own_host(call, parts.netloc):
            raise wrong
        return unquote(found[1], errors="strict")
    except ValueError as error:  # of urlsplit and unquote
        raise wrong from error


def _is_own_host(call: Call, authority: str) -> bool:
    """Whether a host and port are those of the request, or a name that the setting http_hosts has."""
    given = authority.lower().encode("idna" if not authority.isascii() else "ascii")
    if given == call.headers.get(b"host", b"").lower():
        return True
    hosts = {host.lower() for host in call.gateway.settings.http_hosts}
    return "*" in hosts or host_name(given) in hosts


def _base_url(call: Call) -> str:
    host = call.headers.get(b"host", b"")
    if not host_name(host):
        raise HttpError("malformed_request", "the request has no Host, by which a subscriber could find this hub")
    return f"{call.connection.scheme or 'http'}://{host.decode('ascii').lower()}"


WEBSUB_ROUTES = [
    Route(
        "POST", HUB_PATH, answer_hub, "Subscribe a callback to a topic, or unsubscribe it, by WebSub", WEBSUB, 202,
        body=HubRequest, body_types=(FORM,), body_required=True, answer=WebSubAccepted,
        errors=("address_refused", "busy", "limit_exceeded", "plugin_unavailable", "topic_not_found",
                "webhook_not_found"),
        example={
            "hub.mode": "subscribe", "hub.callback": "https://example.org/callback",
            "hub.topic": "http://127.0.0.1:7391/v1/topics/orders/messages",
        },
    ),
]  # fmt: skip
"""The routes of the hub."""
