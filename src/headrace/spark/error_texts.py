"""Reduces Spark's errors to one sentence, without the plan and without Java or Python stack traces."""

import re
from typing import Any

from py4j.protocol import Py4JJavaError

_TRACEBACK = "Traceback (most recent call last)"
_OURS = re.compile(r"^headrace[\w.]*\.(\w+): (.*)$", re.MULTILINE)
_RAISED = re.compile(r"^([A-Za-z_][\w.]*): (.*)$", re.MULTILINE)
_CONDITION = re.compile(r"^\[[A-Z0-9_.]+\] ")
_STATE = re.compile(r"\s*SQLSTATE: \w+\.?")
_PLACE = re.compile(r"line (\d+),? (pos|position) (\d+)")
"""Spark counts from 0 where it says `pos`, and from 1 where it says `position`."""
_NOT_FOUND = "The table or view "
_MEMORY = re.compile(
    r"OutOfMemory|Java heap space|GC overhead limit|(UNABLE_TO|CANNOT)_ACQUIRE_MEMORY|Unable to acquire \d+ bytes"
)
_CAUSES_MAX = 20


def problem_text(error: BaseException) -> str:
    """Return a one-sentence text for an error of Spark, with advice where memory was short."""
    text = _whole_text(error)
    summary = _python_text(text) if is_of_python(error) else _sentence(text)
    return f"{summary}{memory_advice(text)}"


def memory_advice(text: str) -> str:
    """Return which memory setting to raise if Java ran out of memory; else an empty text.

    >>> "--conf spark.driver.memory=4g" in memory_advice("java.lang.OutOfMemoryError: Java heap space")
    True
    >>> "--conf spark.driver.maxResultSize=4g" in memory_advice("1100 MiB is bigger than spark.driver.maxResultSize")
    True
    >>> memory_advice("Division by zero.")
    ''
    """
    if "maxResultSize" in text:
        return (
            ". The result is too large to be sorted in one place: raise spark.driver.maxResultSize (1g by default), "
            "as in --conf spark.driver.maxResultSize=4g, and spark.driver.memory with it"
        )
    if _MEMORY.search(text):
        return (
            ". Spark has too little memory: raise spark.driver.memory, and on a cluster spark.executor.memory "
            "(1g by default), as in --conf spark.driver.memory=4g"
        )
    return ""


def is_of_python(error: BaseException) -> bool:
    """Return whether the error comes from a Python worker: from our source, or from the user's functions."""
    return _TRACEBACK in _whole_text(error)


def _whole_text(error: BaseException) -> str:
    if not isinstance(error, Py4JJavaError):
        return str(error)
    texts: list[str] = []
    java: Any = error.java_exception
    while java is not None and len(texts) < _CAUSES_MAX:
        texts.append(str(java.getMessage() or java.getClass().getSimpleName()))
        java = java.getCause()
    traces = [text for text in texts if _TRACEBACK in text]
    return traces[-1] if traces else texts[-1]


def _python_text(text: str) -> str:
    """Return the error from a text with tracebacks; Headrace errors take precedence over their consequences.

    >>> _python_text("Traceback (most recent call last):\\n  File ...\\nheadrace.model.errors.TopicNotFound: gone\\n")
    'gone'
    >>> _python_text("Traceback (most recent call last):\\n  File ...\\nValueError: wrong\\n SQLSTATE: 38000")
    'ValueError: wrong'
    """
    ours = _OURS.findall(text)
    if ours:
        return str(ours[-1][1])
    raised = _RAISED.findall(text.rpartition(_TRACEBACK)[2])
    return f"{raised[-1][0].rpartition('.')[2]}: {raised[-1][1]}" if raised else _sentence(text)


def _sentence(text: str) -> str:
    """Return the first line, which names the problem, with its position in the statement.

    >>> _sentence("[X.Y] The column `a` is not there.\\nMore. SQLSTATE: 42P01; line 1 pos 14;\\n'Project [*]\\n")
    'The column `a` is not there. (line 1, position 15)'
    """
    first = _CONDITION.sub("", next((line.strip() for line in text.splitlines() if line.strip()), ""))
    first = _STATE.split(first)[0].rstrip("; ")
    if first.startswith(_NOT_FOUND):
        first = first.partition(" Verify ")[0]
    place = _PLACE.search(text.partition("\n== SQL ==")[0])
    if place is None:
        return first
    return f"{first} (line {place[1]}, position {int(place[3]) + (place[2] == 'pos')})"
