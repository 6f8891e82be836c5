"""Headrace on Spark: every topic is a DataFrame, batch or streaming, in and out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.spark.pipelines import pipeline
    from headrace.spark.sessions import session

_HOMES = {
    "pipeline": "headrace.spark.pipelines",
    "session": "headrace.spark.sessions",
}
__all__ = ["pipeline", "session"]  # found when they are asked for: Spark imports this package often


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
