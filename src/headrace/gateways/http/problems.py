"""Errors as HTTP tells them: the status of every error code, and problem documents (RFC 9457)."""

from typing import Any

import msgspec

from headrace.model.arguments import shortened
from headrace.model.cluster_errors import IN_DOUBT_TEXT
from headrace.model.errors import Fenced, HeadraceError, NotServing

PROBLEM_TYPE = b"application/problem+json"
HELP_PATH = "/v1/docs"
"""The page that explains every code; `#` and the code follow."""
RETRY_SECONDS = 1
"""What Retry-After says where nothing better is known."""

STATUSES: dict[str, int] = {
    "error": 500,
    "not_serving": 503,
    "fenced": 503,
    "store_unavailable": 503,
    "store_unqualified": 500,
    "store_went_back": 500,
    "invalid_argument": 422,
    "invalid_event": 422,
    "message_too_large": 413,
    "batch_too_large": 413,
    "invalid_batch": 422,
    "corrupt_batch": 500,
    "corrupt_file": 500,
    "unsupported_format": 500,
    "data_directory_damaged": 500,
    "not_a_data_directory": 500,
    "offset_out_of_range": 416,
    "message_gone": 410,
    "log_not_found": 404,
    "log_closed": 503,
    "log_read_only": 409,
    "log_in_use": 409,
    "log_owned": 409,
    "cursor_in_use": 409,
    "log_failed": 503,
    "disk_full": 507,
    "disk_failed": 500,
    "too_many_files": 503,
    "durability_unavailable": 422,
    "timeout": 504,
    "topic_not_found": 404,
    "topic_exists": 409,
    "topic_failed": 409,
    "partition_not_found": 404,
    "group_not_found": 404,
    "group_in_use": 409,
    "member_fenced": 409,
    "unknown_member": 409,
    "unexpected_offset": 412,
    "out_of_order_sequence": 409,
    "unknown_producer": 409,
    "producer_fenced": 409,
    "transaction_not_found": 404,
    "transaction_fenced": 409,
    "subscription_not_found": 404,
    "subscription_exists": 409,
    "subscription_failed": 409,
    "subscription_full": 429,
    "subscription_reopened": 409,
    "lease_expired": 409,
    "not_lease_holder": 409,
    "stale_version": 412,
    "message_leased": 409,
    "not_owner": 403,
    "schedule_not_found": 404,
    "schedule_exists": 409,
    "limit_exceeded": 409,
    "busy": 429,
    "draining": 503,
    "cancelled": 503,
    "listen_failed": 500,
    "gateway_unavailable": 500,
    "protocol_error": 400,
    "unsupported_version": 400,
    "unsupported_operation": 501,
    "connection_failed": 502,
    "tls_failed": 502,
    "closed": 503,
    "forked": 500,
    "idempotency_key_reused": 422,
    "idempotency_table_full": 429,
    "message_refused": 422,
    "middleware_failed": 500,
    "middleware_timeout": 503,
    "no_responders": 404,
    "responder_lost": 503,
    "service_failed": 502,
    "service_not_found": 404,
    "not_registered": 403,
    "not_authenticated": 401,
    "token_expired": 401,
    "token_revoked": 401,
    "forbidden": 403,
    "security_required": 409,
    "role_not_found": 404,
    "binding_not_found": 404,
    "token_not_found": 404,
    "version_conflict": 412,
    "unexpected_version": 412,
    "events_missing": 410,
    "topic_changed": 409,
    "handler_ended_transaction": 500,
    "invalid_content_query": 422,
    "content_support_missing": 501,
    "topic_is_view": 409,
    "topic_has_views": 409,
    "route_not_found": 404,
    "route_exists": 409,
    "route_loop": 409,
    "webhook_not_found": 404,
    "webhook_exists": 409,
    "plugin_unavailable": 422,
    "delivery_refused": 503,
    "delivery_failed": 502,
    "address_refused": 422,
    "job_failed": 409,
    "quota_exceeded": 403,
    "throttled": 429,
    "tenant_not_found": 404,
    "tenant_exists": 409,
    "tenant_not_empty": 409,
    "internal_error": 500,
}
"""The HTTP status of every error code."""

_RETRY_LATER = frozenset({429, 503})
_RETRYABLE_CODES = frozenset({"request_timeout", "too_many_connections"})
"""Of HTTP's own."""


class HttpError(Exception):
    """A request that HTTP itself refuses: it has a status, a code, and says what to do."""

    codes: dict[str, tuple[int, str]] = {  # noqa: RUF012 the one table
        "malformed_request": (400, "The bytes are no HTTP request, or one that could be understood in two ways."),
        "invalid_json": (400, "The body is no JSON, or is nested too deeply."),
        "invalid_encoding": (400, "The body is not what its Content-Encoding says, or a name is no UTF-8."),
        "host_refused": (403, "The Host is none of this broker's names; see the setting http_hosts."),
        "origin_refused": (403, "A page of this Origin may not use the broker; see the setting http_origins."),
        "path_not_found": (404, "There is nothing at this path; /v1/docs lists what there is."),
        "method_not_allowed": (405, "The path does not have this method; Allow lists those that it has."),
        "not_acceptable": (406, "The path has no answer of a type that Accept names."),
        "request_timeout": (408, "The request did not arrive in time."),
        "precondition_failed": (412, "The message has another version than If-Match says."),
        "body_too_large": (413, "The body is larger than the broker takes; see the setting http_body_bytes_max."),
        "unsupported_media_type": (415, "The Content-Type, or the Content-Encoding, is none that the path takes."),
        "invalid_field": (422, "A field of the body, of the query or of the head is missing, unknown or wrong."),
        "upgrade_required": (426, "The path speaks another protocol, which the client must ask for by Upgrade."),
        "head_too_large": (431, "The head of the request is too large."),
        "too_many_connections": (503, "The broker has as many connections as connections_max allows; try later."),
    }
    """Status and meaning by code."""

    def __init__(self, code: str, text: str = "", headers: tuple[tuple[bytes, bytes], ...] = (), **details: Any):
        self.status, meaning = self.codes[code]
        super().__init__(text or meaning)
        self.code = code
        self.headers = headers
        self.details = details


class ProblemDocument(msgspec.Struct):
    """A problem document: what went wrong, by RFC 9457."""

    type: str
    """A page that explains the code."""
    title: str
    """The code in words."""
    status: int
    detail: str
    """What happened, to what, and what to do."""
    code: str
    """The error's code, which does not change between versions."""
    retryable: bool = False
    """Whether the same request may succeed later."""
    details: dict[str, Any] = {}
    """What a program may want to know, such as the offsets there are."""


def begun_error(error: HeadraceError) -> HeadraceError:
    """The error for a request that was begun when its session was ended: NotServing says that nothing was done."""
    return Fenced(f"{error}: {IN_DOUBT_TEXT}") if isinstance(error, NotServing) else error


def status_of(error: HeadraceError) -> int:
    """The HTTP status of an error; an unknown code is that of a newer part of Headrace."""
    return STATUSES.get(error.code, 503 if error.retryable else 500)


def problem_of(error: HeadraceError | HttpError) -> ProblemDocument:
    """The problem document of an error."""
    is_ours = isinstance(error, HeadraceError)
    status = status_of(error) if is_ours else error.status  # type: ignore[union-attr, arg-type]
    return ProblemDocument(
        type=f"{HELP_PATH}#{error.code}",
        title=error.code.replace("_", " "),
        status=status,
        detail=shortened(error),
        code=error.code,
        retryable=error.retryable if isinstance(error, HeadraceError) else error.code in _RETRYABLE_CODES,
        details=error.details,
    )


def encode_problem(problem: ProblemDocument) -> bytes:
    """The bytes of a problem document; details that JSON cannot have are told as text."""
    return msgspec.json.encode(problem, enc_hook=str)


def problem_headers(problem: ProblemDocument) -> list[tuple[bytes, bytes]]:
    """The headers of an answer that is a problem, besides its type and length."""
    if problem.status in _RETRY_LATER and problem.code != Fenced.code:  # who repeats that must look first
        retry_ms = problem.details.get("retry_after_ms", RETRY_SECONDS * 1000)
        return [(b"retry-after", b"%d" % max(-(-retry_ms // 1000), 1))]
    return [(b"www-authenticate", b"Bearer")] if problem.status == 401 else []


def raw_problem(error: HeadraceError | HttpError) -> bytes:
    """A whole response with a problem document, for a connection that is closed then."""
    problem = problem_of(error)
    body = encode_problem(problem)
    head = [b"HTTP/1.1 %d %s\r\n" % (problem.status, problem.title.title().encode())]
    head += [b"%s: %s\r\n" % header for header in problem_headers(problem)]
    head.append(b"content-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (PROBLEM_TYPE, len(body)))
    return b"".join([*head, body])
