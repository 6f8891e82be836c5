"""Lines of the server's log: nothing that a client sends makes a line of its own, or steers a terminal."""

import logging
import sys

from headrace.cli.terminal.log_format import TextLines

FORGED = "ok\n2026-01-31T12:00:00.000Z error headrace.server all is lost \x1b[31m\x85\u2028"


def record(text: str, *contents: object, **fields: object) -> logging.LogRecord:
    found = logging.LogRecord("headrace.http", logging.WARNING, "", 0, text, contents, None)
    vars(found).update(fields)
    return found


def test_a_message_and_its_fields_are_one_line() -> None:
    line = TextLines().format(record("request refused  reason=%s", FORGED, detail=FORGED))
    assert line.isprintable()
    assert r"reason=ok\n2026-01-31T12:00:00.000Z error" in line
    assert r"\x1b[31m\x85\u2028" in line


def test_the_text_of_an_error_cannot_be_taken_for_a_record() -> None:
    failed = record("request failed")
    try:
        raise ValueError(FORGED)
    except ValueError:
        failed.exc_info = sys.exc_info()
    first, *others = TextLines().format(failed).split("\n")
    assert first.endswith("warning headrace.http request failed")
    assert all(line.startswith("  ") and line.isprintable() for line in others)
    assert others[0] == "  Traceback (most recent call last):"
