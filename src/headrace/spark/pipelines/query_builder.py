"""Builds and starts the streaming query of a definition."""

import traceback
from typing import TYPE_CHECKING, Any

from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.spark.error_texts import is_of_python, problem_text
from headrace.spark.pipelines.batch_sink import BatchSink
from headrace.spark.pipelines.definition import APPEND, Definition
from headrace.spark.pipelines.progress import ROWS_OUT
from headrace.spark.pipelines.sources_sinks import HEADRACE, PipelineSource
from headrace.spark.pipelines.triggers import Trigger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_ERROR_CHARS_MAX = 8000
_PLAN_BEGINS = "=== Streaming Query ==="
_JAVA_BEGINS = "\n\nJVM stacktrace:"


def start_query(
    session: "SparkSession", definition: Definition, *, address: str, checkpoints: str, once: bool
) -> "StreamingQuery":
    """Start the query that a definition describes.

    Parameters:
        session: the Spark session.
        definition: the query's definition.
        address: the broker's address, for sources and sinks that name none.
        checkpoints: the directory of the query's checkpoint.
        once: process the available data and end, whatever the trigger is.
    """
    try:
        frame = _frame(session, definition, address)
        options = _sink_options(definition, address)
        batches = None
        if definition.sink.format == HEADRACE and definition.output_mode != APPEND:
            batches = BatchSink(session, frame, options, definition.output_mode)
        writer = _writer(frame, definition, options, batches)
        if definition.sink.keeps_progress:
            writer = writer.option("checkpointLocation", f"{checkpoints.rstrip('/')}/{definition.name}")
        trigger = Trigger(available_now=True) if once else definition.trigger
        if trigger.words:
            writer = writer.trigger(**trigger.words)
        query = writer.toTable(definition.sink.table) if definition.sink.table else writer.start()
        if batches is not None:
            batches.begin(query)
        return query
    except HeadraceError as error:
        raise InvalidArgument(f"{_where(definition, error)}: {definition.name}: {error}") from error
    except Exception as error:  # the function is the user's, and what Spark raises has no common ancestor
        raise InvalidArgument(f"{_where(definition, error)}: {definition.name}: {error_text(error)}") from error


def error_text(error: BaseException) -> str:
    """Return the text of Spark's error, without the plan and the Java stack trace."""
    text = str(error).partition(_PLAN_BEGINS)[0].partition(_JAVA_BEGINS)[0].strip()
    if is_of_python(told := RuntimeError(text)):
        return problem_text(told)
    kind = type(error).__name__
    whole = text if text.startswith("[") or not text else f"{kind}: {text}"
    if len(whole) <= _ERROR_CHARS_MAX:
        return whole or kind
    return f"{whole[: _ERROR_CHARS_MAX // 2]} ... {whole[-_ERROR_CHARS_MAX // 2 :]}"


def _frame(session: "SparkSession", definition: Definition, address: str) -> "DataFrame":
    inputs = [_source_frame(session, source, address) for source in definition.sources]
    if definition.function is None:
        for source, frame in zip(definition.sources, inputs, strict=True):
            frame.createOrReplaceTempView(source.argument)
        made: Any = session.sql(definition.sql)
    else:
        more = {"spark": session} if definition.wants_session else {}
        if definition.by_name:
            named = {source.argument: frame for source, frame in zip(definition.sources, inputs, strict=True)}
            made = definition.function(**named, **more)
        else:
            made = definition.function(*inputs, **more)
    return _checked_frame(made)


def _checked_frame(made: Any) -> "DataFrame":
    if not hasattr(made, "writeStream"):
        raise InvalidArgument(f"a pipeline returns a DataFrame, and this one has returned {made!r}")
    if not made.isStreaming:
        raise InvalidArgument(
            "a pipeline returns a streaming DataFrame: at least one source must not be read as a batch"
        )
    frame: DataFrame = made
    return frame


def _source_frame(session: "SparkSession", source: PipelineSource, address: str) -> "DataFrame":
    reader: Any = (session.read if source.batch else session.readStream).format(source.format)
    options = dict(source.options)
    if source.format == HEADRACE and "path" not in options:
        options.setdefault("address", address)
    if source.schema:
        reader = reader.schema(source.schema)
    frame: DataFrame = reader.options(**options).load()
    return frame if source.watermark is None else frame.withWatermark(*source.watermark)


def _sink_options(definition: Definition, address: str) -> dict[str, str]:
    options = dict(definition.sink.options)
    if definition.sink.format == HEADRACE:
        options.setdefault("address", address)
    return options


def _writer(
    frame: "DataFrame", definition: Definition, options: dict[str, str], batches: BatchSink | None
) -> "DataStreamWriter":
    from pyspark.sql.functions import count, lit

    sink = definition.sink
    counted = frame.observe(ROWS_OUT, count(lit(1)).alias("rows"))
    writer = counted.writeStream.queryName(definition.name).outputMode(definition.output_mode)
    if sink.function is not None:
        return writer.foreachBatch(sink.function)
    if batches is not None:
        return writer.foreachBatch(batches.write)
    if sink.format:
        writer = writer.format(sink.format)
    if sink.partition_by:
        writer = writer.partitionBy(*sink.partition_by)
    return writer.options(**options)


def _where(definition: Definition, error: BaseException) -> str:
    """Return the file and line at which the error was raised, or those of the pipeline's function."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == definition.file]
    return f"{definition.file}:{lines[-1]}" if lines else definition.place
