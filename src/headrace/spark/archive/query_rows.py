"""Converts archived messages to a query's columns and value format, without expired messages."""

import logging
import time
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from headrace.model.batch import Batch, Columns, encode
from headrace.model.errors import CorruptFile
from headrace.model.headers import Headers, headers_from_pairs
from headrace.spark.archive.manifest import StoredFile
from headrace.spark.archive.parquet import COLUMNS, rows_of
from headrace.spark.source.arrow import Values
from headrace.spark.source.planning import Range

logger = logging.getLogger("headrace.spark")

_BATCH_ROWS = 10_000


class ArchivedRowReader:
    """Reads archived files as record batches of a query's schema."""

    def __init__(self, schema: pa.Schema, values: Values, *, fail_on_data_loss: bool = True) -> None:
        self._schema = schema
        self._values = values
        self._fail = fail_on_data_loss
        wanted = [name for name in COLUMNS if name in schema.names and name not in ("partition", "offset", "expires")]
        if "_corrupt" in schema.names and "value" not in wanted:
            wanted.append("value")
        self._columns = ["offset", "expires", *wanted]

    def record_batches(self, wanted: Range, files: Sequence[StoredFile]) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range."""
        for stored in files:
            try:
                for batch in rows_of(stored, wanted.start, wanted.end, self._columns):
                    alive = unexpired(batch)
                    if alive.num_rows:
                        yield self._record_batch(wanted, alive)
            except CorruptFile as error:
                if self._fail:
                    raise
                logger.warning("archived messages of %s[%s] are lost: %s", wanted.topic, wanted.partition, error)

    def _record_batch(self, wanted: Range, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays: dict[str, pa.Array] = {}
        rows = batch.num_rows
        for field in self._schema:
            if field.name in arrays:
                continue
            if field.name == "topic":
                arrays["topic"] = pa.repeat(pa.scalar(wanted.topic, pa.string()), rows)
            elif field.name == "partition":
                arrays["partition"] = pa.repeat(pa.scalar(wanted.partition, pa.int32()), rows)
            elif field.name == "_corrupt" or (field.name == "value" and not pa.types.is_binary(field.type)):
                arrays |= self._values(batch.column("value"))
            else:
                column = batch.column(field.name)
                arrays[field.name] = column if column.type.equals(field.type) else column.cast(field.type)
        return pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)


def unexpired(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the messages that have not expired."""
    expires = batch.column("expires")
    if expires.null_count == len(expires):
        return batch
    over = pc.less_equal(expires.cast(pa.int64()), time.time_ns() // 1000)
    return batch.filter(pc.invert(pc.fill_null(over, False)))


def batches_of(files: Sequence[StoredFile], start: int, end: int) -> Iterator[Batch]:
    """Yield archived messages as batches of the log's format; slower than record batches."""
    for stored in files:
        for rows in rows_of(stored, start, end, COLUMNS):
            for at in range(0, rows.num_rows, _BATCH_ROWS):
                yield _batch(rows.slice(at, _BATCH_ROWS))


def _batch(rows: pa.RecordBatch) -> Batch:
    offsets = rows.column("offset").to_pylist()
    times = {name: rows.column(name).cast(pa.int64()).to_pylist() for name in ("timestamp", "due", "expires")}
    columns = Columns(
        rows.column("value").to_pylist(),
        rows.column("key").to_pylist(),
        times["timestamp"],
        _headers(rows),
        times["due"],
        rows.column("priority").to_pylist(),
        times["expires"],
        [offset - offsets[0] for offset in offsets],
    )
    batch = encode(columns, 0, span=offsets[-1] - offsets[0] + 1)
    batch.place(offsets[0], 0, 0)
    return batch


def _headers(rows: pa.RecordBatch) -> list[Headers | None]:
    given = rows.column("headers").to_pylist()
    return [
        None if headers is None else headers_from_pairs((one["key"], one["value"]) for one in headers) or {}
        for headers in given
    ]
