"""Log formatters of the server: lines for people or JSON for programs, both with separate fields."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_KNOWN = set(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info headrace.server ready port=7390`"""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the traceback if there is one."""
        fields = "".join(f" {name}={_quoted(content)}" for name, content in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {record.name} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, tracebacks included."""
        content = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


def log_to_stderr(level: str, form: str) -> None:
    """Configure logging of Headrace and its libraries to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("headrace").setLevel(level.upper())


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: content for name, content in vars(record).items() if name not in _KNOWN}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quoted(content: object) -> str:
    text = str(content)
    return text if text.isprintable() and not set(text) & set(' "=') and text else json.dumps(text)
