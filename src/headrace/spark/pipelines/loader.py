"""Loads pipelines from Python files with decorated functions or from SQL files; errors name the line."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.spark.errors import SessionNeeded, SparkMissing
from headrace.spark.pipelines.definition import Definition, collect_definitions
from headrace.spark.pipelines.sql_files import definition_from_sql

MODULE = "headrace_pipeline_file"
"""The name under which a file is imported."""
_NO_SESSION = ("SESSION_OR_CONTEXT_NOT_EXISTS", "NO_ACTIVE_SESSION", "NO_ACTIVE_OR_DEFAULT_SESSION")
_MARK = "__headrace_pipeline__"


def load(path: str) -> list[Definition]:
    """Return the pipelines of a file, in their order in the file."""
    file = os.path.abspath(path)
    if not os.path.isfile(file):
        raise InvalidArgument(f"there is no file {path}") from FileNotFoundError(path)
    kind = os.path.splitext(file)[1].lower()
    if kind == ".sql":
        with open(file, encoding="utf-8") as opened:
            return [definition_from_sql(opened.read(), file)]
    if kind != ".py":
        raise InvalidArgument(f"{path} is neither a Python file (.py) nor an SQL file (.sql)")
    found = _from_python(file)
    if not found:
        raise InvalidArgument(f"{path} has no pipeline: put @headrace.spark.pipeline(...) before a function")
    _check_names(found)
    return found


def settings_of(definitions: Sequence[Definition]) -> dict[str, str]:
    """Return the Spark settings of a file's pipelines, which must agree as they share one application."""
    wanted: dict[str, tuple[str, Definition]] = {}
    for definition in definitions:
        for name, value in definition.conf.items():
            before, who = wanted.setdefault(name, (value, definition))
            if before != value:
                raise InvalidArgument(
                    f"{definition.place}: {definition.name} wants {name}={value}, and {who.name} wants {before}; "
                    "pipelines of one file share their settings"
                )
    return {name: value for name, (value, _) in wanted.items()}


def _from_python(file: str) -> list[Definition]:
    collected: list[Definition] = []
    with collect_definitions(collected):
        module = _imported(file)
    # Definitions of other files count only if this file imports them by name.
    taken = [getattr(each, _MARK) for each in vars(module).values() if callable(each) and hasattr(each, _MARK)]
    own = [definition for definition in collected if definition.file == file]
    others = {id(definition): definition for definition in taken if definition.file != file}
    return [*own, *others.values()]


def _imported(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = os.path.dirname(file)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as if Python ran the file
    sys.modules[MODULE] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "pyspark":
            raise SparkMissing(
                "pyspark is not installed; "
                "in a checkout, `bin/setup spark` installs it; elsewhere `pip install '/path/to/headrace[spark]'`"
            ) from error
        raise InvalidArgument(f"{_where(file, error)}: {error}") from error
    except SyntaxError as error:
        raise InvalidArgument(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except HeadraceError as error:
        raise InvalidArgument(f"{_where(file, error)}: {error}") from error
    except Exception as error:  # whatever the file does wrong
        if _wants_session(error):
            raise SessionNeeded(f"{_where(file, error)}: {error}") from error
        raise InvalidArgument(f"{_where(file, error)}: {type(error).__name__}: {error}") from error
    _send_code_of(module)
    return module


def _wants_session(error: Exception) -> bool:
    """Return whether the file has called a function that needs a session, such as `col`, at import."""
    if isinstance(error, AssertionError):  # some functions of PySpark assert a session
        return "pyspark" in Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts
    return getattr(error, "getCondition", lambda: "")() in _NO_SESSION


def _send_code_of(module: ModuleType) -> None:
    """Pickle the functions of a file by value, as Spark's workers cannot import the file."""
    if "pyspark" in sys.modules:
        from pyspark import cloudpickle

        register: Any = cloudpickle.register_pickle_by_value
        register(module)


def _where(file: str, error: BaseException) -> str:
    """Return the file and line at which an error was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else file


def _check_names(definitions: list[Definition]) -> None:
    first: dict[str, Definition] = {}
    for definition in definitions:
        other = first.setdefault(definition.name, definition)
        if other is not definition:
            raise InvalidArgument(
                f"{definition.place}: there is a pipeline {definition.name!r} at line {other.line} already; "
                "give one of them another name, with name="
            )
