"""The definition of a pipeline: its sources, function or SQL, sink and trigger."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.model.errors import InvalidArgument
from headrace.model.topic import checked_plain_name
from headrace.spark.pipelines.sources_sinks import PipelineSink, PipelineSource, sink_of, sources_of, texts
from headrace.spark.pipelines.triggers import Trigger, trigger_of

APPEND = "append"
OUTPUT_MODES = (APPEND, "update", "complete")
SESSION_ARGUMENT = "spark"
"""The argument of a function that receives the session."""

Function = TypeVar("Function", bound=Callable[..., Any])
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_found: ContextVar[list["Definition"] | None] = ContextVar("found", default=None)


@dataclass(frozen=True)
class Definition:
    """The validated definition of a streaming query."""

    name: str
    sources: tuple[PipelineSource, ...]
    sink: PipelineSink
    trigger: Trigger = field(default_factory=Trigger)
    output_mode: str = "append"
    conf: Mapping[str, str] = field(default_factory=dict)
    """Spark settings, which apply to the whole application."""
    function: Callable[..., Any] | None = None
    """Transforms the sources' DataFrames into one DataFrame."""
    sql: str = ""
    """A query over the sources as views, instead of a function."""
    by_name: bool = False
    """Whether the function receives its sources as keyword arguments."""
    wants_session: bool = False
    file: str = ""
    line: int = 0

    @property
    def place(self) -> str:
        """The file and line of the definition."""
        return f"{self.file}:{self.line}"


def pipeline(
    *,
    source: Any,
    sink: Any,
    trigger: str | None = None,
    output_mode: str = "append",
    options: Mapping[str, Any] | None = None,
    conf: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Callable[[Function], Function]:
    """Make a function a pipeline: a streaming query that `headrace pipeline run FILE` runs.

    The function gets a DataFrame for each source, and the session if it has an argument `spark`. It returns a
    streaming DataFrame with the columns that the sink takes. It stays an ordinary function, which tests may call.

    Parameters:
        source: a topic, a list of topics, or argument names mapped to topics or to options of `format("headrace")`.
            With `format` among the options it is another source of Spark, with `batch` a table that is read once at the
            start, with `schema` one of such columns, and `watermark` says how late rows may be: `timestamp 10 minutes`.
        sink: a topic, `console`, `noop`, a function of a DataFrame and a batch's number, or options of
            `format("headrace")`. With `format` it is another sink of Spark, with `table` one of its tables;
            `partitionBy` is a list of columns.
        trigger: `10 seconds`, `available now`, or `as fast as possible`, which is the default.
        output_mode: `append`; `update`, which writes the rows of groups that have changed; or `complete`, which writes
            all of them with every batch.
        options: for all sources that are topics, such as `{"maxOffsetsPerTrigger": 100000}`.
        conf: settings of Spark for the whole file.
        name: the name of the query; by default the function's.

    Returns:
        The decorator, which returns the function unchanged.

    Raises:
        InvalidArgument: if an argument is wrong.

    Example:
        >>> from headrace.spark import pipeline
        >>> @pipeline(source={"orders": {"subscribe": "orders", "value.format": "json"}}, sink="large-orders")
        ... def large_orders(orders):
        ...     return orders.where("value.amount > 1000").selectExpr("key", "to_json(value) AS value")
    """

    def register(function: Function) -> Function:
        definition = _defined(function, source, sink, trigger, output_mode, options or {}, conf or {}, name)
        function.__headrace_pipeline__ = definition  # type: ignore[attr-defined]
        found = _found.get()
        if found is not None:
            found.append(definition)
        return function

    return register


@contextmanager
def collect_definitions(found: list[Definition]) -> Iterator[None]:
    """Append the definitions that are made in the block to a list."""
    token = _found.set(found)
    try:
        yield
    finally:
        _found.reset(token)


def checked_mode(mode: Any) -> str:
    """Return the output mode; raises InvalidArgument if it is unknown."""
    if mode not in OUTPUT_MODES:
        raise InvalidArgument(f"there is no output mode {mode!r}: it is {', '.join(OUTPUT_MODES)}")
    return str(mode)


def checked_conf(conf: Mapping[str, Any]) -> dict[str, str]:
    """Return Spark settings as text; raises InvalidArgument for names that are not Spark's."""
    for name in conf:
        if not str(name).startswith("spark."):
            raise InvalidArgument(f"conf has names that begin with 'spark.', not {name!r}")
    return texts(conf)


def _defined(
    function: Callable[..., Any],
    source: Any,
    sink: Any,
    trigger: str | None,
    output_mode: str,
    options: Mapping[str, Any],
    conf: Mapping[str, Any],
    name: str | None,
) -> Definition:
    if not inspect.isfunction(function):
        raise InvalidArgument(f"@pipeline(...) stands before a function, not before {function!r}")
    called = checked_plain_name(name or function.__name__, "pipeline")
    sources = sources_of(source, options)
    by_name = isinstance(source, Mapping)
    parameters = inspect.signature(function).parameters
    wants_session = SESSION_ARGUMENT in parameters and SESSION_ARGUMENT not in (each.argument for each in sources)
    _check_arguments(called, parameters, sources, by_name, wants_session)
    code = function.__code__
    return Definition(
        name=called,
        sources=sources,
        sink=sink_of(sink),
        trigger=trigger_of(trigger),
        output_mode=checked_mode(output_mode),
        conf=checked_conf(conf),
        function=function,
        by_name=by_name,
        wants_session=wants_session,
        file=code.co_filename,
        line=code.co_firstlineno,
    )


def _check_arguments(
    name: str,
    parameters: Mapping[str, inspect.Parameter],
    sources: Sequence[PipelineSource],
    by_name: bool,
    wants_session: bool,
) -> None:
    """Raise InvalidArgument unless the function accepts its sources as arguments."""
    own = {each: kind for each, kind in parameters.items() if not (wants_session and each == SESSION_ARGUMENT)}
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in own.values()) and not by_name:
        return
    takes = [each.name for each in own.values() if by_name or each.kind in _BY_POSITION]
    needs = [each.name for each in own.values() if each.default is inspect.Parameter.empty]
    given = [source.argument for source in sources] if by_name else takes[: len(sources)]
    unknown = [each for each in given if each not in takes]
    if unknown:
        raise InvalidArgument(
            f"{name}() has no argument {unknown[0]!r}: source names arguments of the function "
            f'({", ".join(takes) or "it has none"}), such as {{"orders": {{"subscribe": "orders"}}}}'
        )
    if len(given) < len(sources):
        raise InvalidArgument(f"{name}() takes {len(takes)} DataFrames, and there are {len(sources)} sources")
    missing = [each for each in needs if each not in given]
    if missing:
        raise InvalidArgument(f"{name}() has an argument {missing[0]!r} that no source is for")
