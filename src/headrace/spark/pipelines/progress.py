"""The progress of a query, converted from Spark's report after each batch."""

import json
import math
import time
from collections.abc import Mapping
from typing import Any

import msgspec

ROWS_OUT = "headrace_rows_out"
"""The name of the metric that counts the sink's rows, as Spark does not count them for all sinks."""


class QueryProgress(msgspec.Struct):
    """The progress of a query in its last batch."""

    pipeline: str
    query: str
    time_us: int
    batch: int = -1
    rows_in: int = 0
    rows_out: int | None = None
    """None if unknown."""
    rows_in_per_s: float = 0.0
    """Rate of arrival."""
    rows_out_per_s: float | None = None
    rows_done_per_s: float = 0.0
    """Rate of processing, the query's capacity."""
    lag: int | None = None
    """Messages that are not yet read; None if unknown."""
    batch_ms: int = 0
    durations_ms: dict[str, int] = {}
    """Duration of each phase of the batch."""
    state_rows: int = 0
    state_bytes: int = 0
    watermark: str = ""
    idle: bool = False
    """Whether the batch had no input."""


def progress_of(pipeline: str, said: Mapping[str, Any]) -> QueryProgress:
    """Convert Spark's progress report from JSON."""
    batch_ms = int(said.get("batchDuration") or 0)
    rows_in = int(said.get("numInputRows") or 0)
    rows_out = _rows_out(said)
    in_per_s = _number(said.get("inputRowsPerSecond")) or _per_s(rows_in, batch_ms)  # the first batch has none
    states = said.get("stateOperators", [])
    return QueryProgress(
        pipeline=pipeline,
        query=said.get("name") or "",
        time_us=time.time_ns() // 1000,
        batch=int(said.get("batchId", -1)),
        rows_in=rows_in,
        rows_out=rows_out,
        rows_in_per_s=in_per_s,
        rows_out_per_s=_out_per_s(rows_in, rows_out, in_per_s, batch_ms),
        rows_done_per_s=_number(said.get("processedRowsPerSecond")),
        lag=lag_of(said.get("sources", [])),
        batch_ms=batch_ms,
        durations_ms={name: int(ms) for name, ms in said.get("durationMs", {}).items()},
        state_rows=sum(int(each.get("numRowsTotal", 0)) for each in states),
        state_bytes=sum(int(each.get("memoryUsedBytes", 0)) for each in states),
        watermark=str(said.get("eventTime", {}).get("watermark", "")),
        idle=not rows_in,
    )


def lag_of(sources: list[Mapping[str, Any]]) -> int | None:
    """Return the lag of the sources; None if no source reports its latest offset.

    >>> lag_of([{"endOffset": {"orders": {"0": 3}}, "latestOffset": {"orders": {"0": 10}}}])
    7
    """
    lags = [_behind(_plain(each.get("endOffset")), _plain(each.get("latestOffset"))) for each in sources]
    known = [lag for lag in lags if lag is not None]
    return sum(known) if known else None


def _behind(end: Any, latest: Any) -> int | None:
    """Return the sum of differences between numbers at the same keys."""
    if isinstance(end, bool) or isinstance(latest, bool):
        return None
    if isinstance(end, int) and isinstance(latest, int):
        return max(latest - end, 0)
    if not isinstance(latest, dict):
        return None
    before = end if isinstance(end, dict) else {}
    parts = [_behind(before.get(name, 0 if isinstance(it, int) else {}), it) for name, it in latest.items()]
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _plain(offset: Any) -> Any:
    """Decode an offset of Spark: JSON, or JSON in a text."""
    if not isinstance(offset, str):
        return offset
    try:
        return json.loads(offset)
    except json.JSONDecodeError:
        return None


def _rows_out(said: Mapping[str, Any]) -> int | None:
    counted = said.get("observedMetrics", {}).get(ROWS_OUT)
    if counted:
        return int(counted["rows"])
    told = int(said.get("sink", {}).get("numOutputRows", -1))
    return told if told >= 0 else None


def _out_per_s(rows_in: int, rows_out: int | None, in_per_s: float, batch_ms: int) -> float | None:
    if rows_out is None:
        return None
    if rows_in and in_per_s:
        return round(rows_out / rows_in * in_per_s, 1)
    return _per_s(rows_out, batch_ms)


def _per_s(rows: int, batch_ms: int) -> float:
    return round(rows * 1000 / batch_ms, 1) if batch_ms else 0.0


def _number(given: Any) -> float:
    """Return a rate, or 0 for Spark's "NaN" and "Infinity"."""
    number = float(given or 0)
    return round(number, 1) if math.isfinite(number) else 0.0


def idle_after(last: QueryProgress) -> QueryProgress:
    """Return the progress of a query that has become idle."""
    idle = QueryProgress(last.pipeline, last.query, time.time_ns() // 1000, last.batch, idle=True)
    idle.rows_out = None if last.rows_out is None else 0
    idle.rows_out_per_s = None if last.rows_out_per_s is None else 0.0
    idle.lag = last.lag
    idle.state_rows, idle.state_bytes, idle.watermark = last.state_rows, last.state_bytes, last.watermark
    return idle
