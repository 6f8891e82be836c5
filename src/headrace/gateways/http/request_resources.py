"""Request and reply: the body is the request's value, and the answer is the reply's."""

import re
from typing import Annotated, Any

import msgspec

from headrace.gateways.http.call import Call, Reply
from headrace.gateways.http.message_headers import message_headers, response_headers
from headrace.gateways.http.problems import HttpError
from headrace.gateways.http.route import ANY_BODY, ANY_TYPE, HeaderField, Route
from headrace.model.limits import REQUEST_SECONDS_MAX
from headrace.model.subject_requests import RequestSend

REQUESTS_TAG = "requests"
_TIMEOUT_S = 30.0
_WAIT = re.compile(rb"(?:^|[,;\s])wait\s*=\s*\"?([0-9]{1,5})\"?(?=$|[,;\s])", re.IGNORECASE)
_PAGE_POLICY = (b"content-security-policy", b"default-src 'none'; sandbox")
"""A reply is not of this site, whatever its content type says: a browser runs nothing of it."""


class RequestQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How long to wait."""

    timeout: Annotated[float, msgspec.Meta(ge=0.001, le=REQUEST_SECONDS_MAX)] | None = None
    """Seconds; by default 30, and never more than the setting `http_wait_seconds_max`."""


async def send_request(call: Call) -> Reply:
    """Ask one of those who serve a subject, and answer with the reply."""
    wanted_s, preference = _timeout(call.query(RequestQuery).timeout, call.headers.get(b"prefer", b""))
    timeout_s = min(wanted_s, call.gateway.settings.http_wait_seconds_max)
    headers = message_headers(call.headers)
    body = await call.read_body()
    request = RequestSend(call.parameters[0], max(round(timeout_s * 1000), 1), headers)
    answer, value = await call.ask_with_body(request, memoryview(bytearray(body)))
    content_type, more = response_headers(answer.headers)
    return Reply(200, bytes(value), content_type, (*more, *preference, _PAGE_POLICY))


def _timeout(timeout: float | None, prefer: bytes) -> tuple[float, tuple[tuple[bytes, bytes], ...]]:
    """How long to wait, and the header that confirms a preference."""
    preferred = _WAIT.search(prefer)
    if preferred is None:
        return _TIMEOUT_S if timeout is None else timeout, ()
    if timeout is not None:
        raise HttpError("invalid_field", "give ?timeout= or Prefer: wait=, not both")
    seconds = int(preferred[1])
    if not 0 < seconds <= REQUEST_SECONDS_MAX:
        raise HttpError("invalid_field", f"Prefer: wait= is 1 to {REQUEST_SECONDS_MAX} seconds, not {seconds}")
    return float(seconds), ((b"preference-applied", b"wait=%d" % seconds),)


PREFER = HeaderField(
    "Prefer", "`wait=10` waits so many seconds for the reply (RFC 7240)", r"^wait=[1-9][0-9]{0,3}$", example="wait=10"
)

REQUEST_ROUTES = [
    Route(
        "POST", "/v1/requests/{subject}", send_request,
        "Ask one of those who serve a subject; the body is the request, of any content type, and the answer the reply",
        REQUESTS_TAG, query=RequestQuery, body=Any, body_types=ANY_BODY, answer=Any, answer_types=(ANY_TYPE,),
        errors=("no_responders", "timeout", "service_failed", "responder_lost", "message_too_large"),
        headers=(PREFER,), example={"id": 1},
    ),
]  # fmt: skip
"""The route of requests."""
