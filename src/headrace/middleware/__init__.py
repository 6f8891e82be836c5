"""Middleware: the interface for authors of plug-ins, and the middleware of Headrace itself, one module each."""

from headrace.model.batch import Columns
from headrace.model.codec import Codec
from headrace.model.errors import InvalidArgument
from headrace.model.headers import Headers, header_pairs, replaced_headers, without_headers
from headrace.model.middleware import (
    API,
    COLUMNS,
    ERROR_HEADER,
    Middleware,
    MiddlewareContext,
    RefusedMessages,
    check_choice,
    check_options,
)

__all__ = [
    "API",
    "COLUMNS",
    "ERROR_HEADER",
    "Codec",
    "Columns",
    "Headers",
    "InvalidArgument",
    "Middleware",
    "MiddlewareContext",
    "RefusedMessages",
    "check_choice",
    "check_options",
    "header_pairs",
    "replaced_headers",
    "without_headers",
]
