"""Output formats of query rows: a table for people, JSON and CSV for programs."""

import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import chain, islice
from typing import Any

import msgspec

from headrace.cli.message_formats import printable
from headrace.cli.terminal.output import Output, counted

_LOOKED_AT = 1000
"""How many rows determine the column widths."""
_COLUMN_MIN = 6
_GAP = "  "
_NULL = "NULL"
_CUT = "…"
_CSV_PLAIN = re.compile(r'[^",\r\n]+')

Row = Sequence[Any]


def _other(value: Any) -> Any:
    if isinstance(value, bytearray):
        return bytes(value)
    return str(value)


_encoder = msgspec.json.Encoder(enc_hook=_other, decimal_format="number")


class JsonRows:
    """Prints each row as one JSON object per line."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self.count = 0

    def print(self, names: Sequence[str], rows: Iterable[Row], _whole: bool = False) -> None:
        """Print rows."""
        heads = [_encoder.encode(name) + b":" for name in _unique(names)]
        for row in rows:
            fields = (head + _encoder.encode(value) for head, value in zip(heads, row, strict=True))
            self._out.add(b"{" + b",".join(fields) + b"}\n")
            self.count += 1
            if self._out.full:
                self._out.flush()
        self._out.flush()

    def close(self, _more: bool = False) -> None:
        """Nothing is left to say."""


def _unique(names: Sequence[str]) -> Sequence[str]:
    """Return unique field names for an object."""
    if len(set(names)) == len(names):
        return names
    from headrace.spark.sql.column_names import unique_names

    return unique_names(names)


class CsvRows:
    """Prints CSV with a heading; "" is empty text, an empty field is NULL."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._begun = False
        self.count = 0

    def print(self, names: Sequence[str], rows: Iterable[Row], _whole: bool = False) -> None:
        """Print rows."""
        if not self._begun:
            self._begun = True
            self._write(names)
        for row in rows:
            self._write([_csv_text(value) for value in row])
            self.count += 1
            if self._out.full:
                self._out.flush()
        self._out.flush()

    def close(self, _more: bool = False) -> None:
        """Nothing is left to say."""

    def _write(self, fields: Sequence[str | None]) -> None:
        line = ",".join("" if field is None else _csv_field(field) for field in fields) + "\n"
        self._out.add(line.encode("utf-8", "surrogateescape"))


class TableRows:
    """Prints a table for people, cut to the terminal's width if there is one, and the number of rows."""

    def __init__(self, out: Output, width: int | None = None) -> None:
        self._out = out
        self._width = terminal_width() if width is None else width
        self._widths: list[int] = []
        self._right: list[bool] = []
        self.count = 0

    def print(self, names: Sequence[str], rows: Iterable[Row], whole: bool = False) -> None:
        """Print rows, with a heading above the first ones and above each complete result."""
        rows = iter(rows)
        first = list(islice(rows, _LOOKED_AT))
        texts = [[cell_text(value) for value in row] for row in first]
        if whole or not self._widths:
            if self.count:
                self._line("")
            self._measure(names, first, texts)
            self._line(self._joined([printable(name.encode()) for name in names]))
            self._line(_GAP.join("-" * width for width in self._widths))
            self.count = 0 if whole else self.count
        for cells in chain(texts, ([cell_text(value) for value in row] for row in rows)):
            self._line(self._joined(cells))
            self.count += 1
            if self._out.full:
                self._out.flush()
        self._out.flush()

    def close(self, more: bool = False) -> None:
        """Print the number of rows."""
        self._line(f"({'first ' if more else ''}{counted(self.count, 'row')})")
        self._out.flush()

    def _measure(self, names: Sequence[str], rows: Sequence[Row], texts: Sequence[Sequence[str]]) -> None:
        widths = [max(map(_columns, column)) for column in zip(names, *texts, strict=True)]
        self._widths = fitted(widths, self._width)
        self._right = [
            any(value is not None for value in column) and all(value is None or _is_number(value) for value in column)
            for column in (zip(*rows, strict=True) if rows else [()] * len(names))
        ]

    def _joined(self, cells: Sequence[str]) -> str:
        padded = [
            padded_to(cell, width, right=right)
            for cell, width, right in zip(cells, self._widths, self._right, strict=True)
        ]
        return _GAP.join(padded).rstrip()

    def _line(self, text: str) -> None:
        self._out.add(text.encode("utf-8", "surrogateescape") + b"\n")


def terminal_width() -> int:
    """Return the width of the terminal; 0 if lines may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else 0


def fitted(widths: Sequence[int], room: int) -> list[int]:
    """Shrink the widest columns until a line fits, if possible; returns the widths.

    >>> fitted([3, 50, 30], 60), fitted([3, 50], 0)
    ([3, 26, 27], [3, 50])
    """
    found = list(widths)
    excess = sum(found) + len(_GAP) * (len(found) - 1) - room if room else 0
    while excess > 0 and found and max(found) > _COLUMN_MIN:
        largest = max(found)
        found[found.index(largest)] -= 1
        excess -= 1
    return found


def padded_to(text: str, width: int, *, right: bool) -> str:
    """Pad or cut a text to a width on the terminal."""
    taken = _columns(text)
    if taken > width:
        text = _cut(text, width)
        taken = _columns(text)
    return " " * (width - taken) + text if right else text + " " * (width - taken)


def cell_text(value: Any) -> str:
    """Format a value for people.

    >>> cell_text(None), cell_text(True), cell_text(b"a"), cell_text([1, None]), cell_text(1.5)
    ('NULL', 'true', 'a', '[1,null]', '1.5')
    """
    if isinstance(value, str):
        return printable(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray):
        return printable(bytes(value))
    return _NULL if value is None else printable(_plain_text(value).encode())


def _csv_field(text: str) -> str:
    """Encode a text as a CSV field.

    >>> _csv_field("a b"), _csv_field(""), _csv_field("a, b")
    ('a b', '""', '"a, b"')
    """
    return text if _CSV_PLAIN.fullmatch(text) else '"' + text.replace('"', '""') + '"'


def _csv_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else _plain_text(value)


def _plain_text(value: Any) -> str:
    if isinstance(value, datetime):
        text = value.isoformat(sep=" ")
        return text.removesuffix("+00:00") + "Z" if value.tzinfo is UTC else text
    if isinstance(value, int | float | Decimal | date) and not isinstance(value, bool):
        return f"{value:f}" if isinstance(value, Decimal) else str(value)
    text = _encoder.encode(value).decode()
    return str(msgspec.json.decode(text)) if text.startswith('"') else text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _columns(text: str) -> int:
    """Return the width of a text on the terminal."""
    if text.isascii():
        return len(text)
    return sum(_sign_columns(sign) for sign in text)


def _sign_columns(sign: str) -> int:
    if unicodedata.combining(sign):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1


def _cut(text: str, width: int) -> str:
    taken = 0
    for at, sign in enumerate(text):
        taken += _sign_columns(sign)
        if taken > width - 1:
            return text[:at] + _CUT
    return text


Printer = JsonRows | CsvRows | TableRows
Make = Callable[[Output], Printer]
