"""Bar charts for the terminal."""

import shutil
from collections.abc import Sequence

from headrace.cli.message_formats import time_text

_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL = "█"
_BAR_COLUMNS_MIN = 10


def bars(rows: Sequence[tuple[str, int]], columns: int | None = None) -> list[str]:
    """Return a line with a bar for each label and number, as wide as the terminal by default.

    >>> bars([("a", 4), ("bb", 1), ("c", 0)], 16)
    ['a   4  ██████████', 'bb  1  ██▌', 'c   0']
    """
    if not rows:
        return []
    columns = shutil.get_terminal_size().columns if columns is None else columns
    label_columns = max(len(label) for label, _ in rows)
    number_columns = max(len(f"{number:,}") for _, number in rows)
    room = max(columns - label_columns - number_columns - 4, _BAR_COLUMNS_MIN)
    most = max(max(number for _, number in rows), 1)
    return [
        f"{label:{label_columns}}  {number:>{number_columns},}  {_bar(number * room * 8 // most, number)}".rstrip()
        for label, number in rows
    ]


def _bar(eighths: int, number: int) -> str:
    eighths = max(eighths, 1) if number else 0  # a number above 0 shows at least a sliver
    return _FULL * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def short_time_text(time_us: int, step_us: int) -> str:
    """Format a time for people, in UTC, as precisely as steps of that length need.

    >>> short_time_text(1_700_000_000_000_000, 3_600_000_000), short_time_text(1_700_000_000_000_000, 500_000)
    ('2023-11-14T22:13Z', '2023-11-14T22:13:20.000000Z')
    """
    text = time_text(time_us)
    if step_us % 60_000_000 == 0 and time_us % 60_000_000 < 30_000_000:
        return text[:16] + "Z"
    return text[:19] + "Z" if step_us % 1_000_000 == 0 else text


def span_text(span_us: int) -> str:
    """Format a time span for people, in its two largest units.

    >>> span_text(250), span_text(1_500_000), span_text(7_500_000_000), span_text(90_000_000_000)
    ('250µs', '1.5s', '2h 5m', '1d 1h')
    """
    if span_us < 1000:
        return f"{span_us}µs"
    if span_us < 1_000_000:
        return f"{span_us / 1000:.3g}ms"
    if span_us < 60_000_000:
        return f"{span_us / 1e6:.3g}s"
    minutes = span_us // 60_000_000
    if minutes < 60:
        return _units(minutes, "m", span_us // 1_000_000 % 60, "s")
    hours = minutes // 60
    return _units(hours, "h", minutes % 60, "m") if hours < 24 else _units(hours // 24, "d", hours % 24, "h")


def _units(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large}{large_unit}" + (f" {small}{small_unit}" if small else "")
