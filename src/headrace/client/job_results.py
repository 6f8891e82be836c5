"""Results of jobs as messages: what a handler returned, or why the job failed for good."""

from typing import Any

import msgspec

from headrace.client.producer.serializing import CannotSerialize
from headrace.model.arguments import shown
from headrace.model.batch import Batch, Columns, encode
from headrace.model.errors import HeadraceError, InvalidArgument, JobFailed, MessageTooLarge
from headrace.model.headers import GivenHeaders, Headers, checked_headers, header_text, replaced_headers
from headrace.model.job_requests import (
    BYTES_RESULT,
    ERROR_RESULT,
    JSON_RESULT,
    REPLY_HEADER,
    RESULT_HEADER,
    RESULT_KINDS,
    TEXT_RESULT,
    JobId,
    parse_job_id,
)
from headrace.model.limits import RESULT_BYTES_MAX


class StoredResult(msgspec.Struct, frozen=True):
    """A result as it is stored."""

    kind: str
    value: bytes

    def opened(self) -> Any:
        """What the handler returned; raises JobFailed if the job failed."""
        if self.kind == TEXT_RESULT:
            return self.value.decode()
        if self.kind == JSON_RESULT:
            return msgspec.json.decode(self.value)
        if self.kind == ERROR_RESULT:
            raise _failure(self.value)
        return self.value


class ExpectedResult:
    """A result that is awaited, and what it is once it was read."""

    __slots__ = ("__weakref__", "id", "stored")

    def __init__(self, id: JobId) -> None:
        self.id = id
        self.stored: StoredResult | None = None


def result_of(returned: Any) -> StoredResult:
    """What a handler returned, as it is stored; raises CannotSerialize if that is not possible.

    >>> result_of({"width": 3})
    StoredResult(kind='json', value=b'{"width":3}')
    >>> result_of("done").opened()
    'done'
    """
    if isinstance(returned, bytes | bytearray | memoryview):
        return StoredResult(BYTES_RESULT, bytes(returned))
    if isinstance(returned, str):
        return StoredResult(TEXT_RESULT, returned.encode())
    try:
        return StoredResult(JSON_RESULT, msgspec.json.encode(returned))
    except Exception as error:
        raise CannotSerialize(
            f"a handler returned a {type(returned).__name__}, which cannot be the result of a job: {shown(error)}; "
            "return bytes, text, or what JSON can hold"
        ) from error


def error_result(error: HeadraceError) -> StoredResult:
    """An error as the result of a job."""
    content = {"code": error.code, "message": str(error), "retryable": error.retryable, "details": {}}
    return StoredResult(ERROR_RESULT, msgspec.json.encode(content))


def fitting_result(returned: Any) -> tuple[StoredResult, HeadraceError | None]:
    """What a handler returned as it is stored, or the error that takes its place if it cannot be stored."""
    try:
        result = result_of(returned)
        if len(result.value) > RESULT_BYTES_MAX:
            raise MessageTooLarge(
                f"a handler returned {len(result.value)} bytes, and a result has {RESULT_BYTES_MAX} at most: store it "
                "elsewhere, and return where"
            )
    except HeadraceError as error:
        return error_result(error), error
    return result, None


def reply_headers(headers: GivenHeaders | None, id: str) -> Headers:
    """The headers of a job whose publisher waits for the result."""
    return replaced_headers(checked_headers(headers), {REPLY_HEADER: id.encode()})


def reply_id(headers: Headers | None) -> str:
    """The id under which a job's publisher waits for the result; empty if nobody waits."""
    if not headers or REPLY_HEADER not in headers:
        return ""
    try:
        return parse_job_id(header_text(headers, REPLY_HEADER).decode("utf-8", "replace")).text
    except InvalidArgument:
        return ""  # anybody can publish such a header


def result_batch(id: str, result: StoredResult, now_us: int) -> Batch:
    """A batch of one message: the result of the job with this id."""
    columns = Columns([result.value], keys=[id.encode()], headers=[{RESULT_HEADER: result.kind.encode()}])
    return encode(columns, now_us)


def stored_results(batch: Batch) -> dict[str, StoredResult]:
    """The results in a batch of the results topic, by the jobs' ids; the first of each job."""
    columns, found = batch.columns(), dict[str, StoredResult]()
    for key, value, headers in zip(columns.keys or (), columns.values, columns.headers or (), strict=False):
        kind = header_text(headers or {}, RESULT_HEADER).decode("utf-8", "replace")
        if key is not None and value is not None and kind in RESULT_KINDS:  # anybody can publish there
            found.setdefault(bytes(key).decode("utf-8", "replace"), StoredResult(kind, bytes(value)))
    return found


class _ErrorContent(msgspec.Struct):
    code: str = "error"
    message: str = ""
    retryable: bool = False
    details: dict[str, Any] = {}


_error_decoder = msgspec.json.Decoder(_ErrorContent)


def _failure(value: bytes) -> JobFailed:
    content = _error_decoder.decode(value)
    return JobFailed(
        content.message or content.code,
        error_code=content.code,
        retryable=content.retryable,
        error_details=content.details,
    )
