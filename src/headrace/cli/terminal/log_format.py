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
        line = _one_line(f"{_time(record)} {record.levelname.lower()} {record.name} {record.getMessage()}{fields}")
        if not record.exc_info:
            return line
        # Texts of errors have lines of their own: indented, they are not taken for records.
        traceback = [f"  {_one_line(one)}" for one in self.formatException(record.exc_info).split("\n")]
        return "\n".join([line, *traceback])


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


def _one_line(text: str) -> str:
    """The text with its control characters escaped: what clients send can neither begin a line nor steer a terminal.

    >>> _one_line("failed\\n2026-01-31 all is lost \\x1b[31m")
    'failed\\\\n2026-01-31 all is lost \\\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
