"""Classifies failures of queries: their cause, and whether a restart can help."""

import re

from headrace.model.errors import HeadraceError, InvalidArgument, TopicNotFound
from headrace.spark.errors import CheckpointIncompatible, QueryFailed, SourceLost

_OPERATORS = re.compile(r"Stateful operators in the metadata: (.*?); Stateful operators in current batch: (\[.*?\])\.")
_SCHEMAS = re.compile(r"Existing (\w+)_schema=(.*?) and new \w+_schema=(.*?)\.$", re.MULTILINE)
_SOURCES = re.compile(r"There are \[(\d+)\] sources in the checkpoint offsets and now there are \[(\d+)\]")
_TOPICS = re.compile(r"the checkpoint (?:is of a query that reads|knows nothing of the topic) [^.]*")
_INCOMPATIBLE = re.compile(r"^\[\w*(?:NOT_COMPATIBLE|NOT_MATCH_IN_STATE_METADATA)\w*\]", re.MULTILINE)
_LOST = re.compile(r"failOnDataLoss|\bTopicNotFound: |there is no topic ")
_RAISED = re.compile(r"^headrace[\w.]*\.(\w+): ", re.MULTILINE)
_MISTAKES = (SyntaxError, NameError, TypeError, AttributeError, ImportError)
"""Errors in the file itself, which a restart cannot fix."""


def query_failure(name: str, text: str, checkpoint: str) -> QueryFailed:
    """Return the error of a failed query, from Spark's text.

    >>> query_failure("totals", "There are [1] sources in the checkpoint offsets and now there are [2]", "/c").code
    'checkpoint_incompatible'
    """
    changed = _change(text)
    if changed:
        return CheckpointIncompatible(
            f"{name} has changed and cannot go on from its checkpoint, {checkpoint}: {changed}. Undo the change; or "
            "run the changed query as another pipeline, headrace pipeline start FILE --name NAME; or give the "
            "checkpoint up, headrace pipeline start FILE --reset-checkpoint, and the sources are read again from "
            "startingOffsets"
        )
    if _LOST.search(text):
        return SourceLost(f"{name} has failed: {text}")
    return QueryFailed(f"{name} has failed: {text}")


def is_permanent(error: BaseException) -> bool:
    """Return whether a restart would fail again until somebody changes something."""
    if isinstance(error, CheckpointIncompatible | SourceLost | TopicNotFound):
        return True
    if not isinstance(error, InvalidArgument):
        return False
    cause = error.__cause__
    if cause is None or isinstance(cause, _MISTAKES):
        return True
    if isinstance(cause, HeadraceError):
        return is_permanent(cause)
    return _is_analysis(cause)


def _change(text: str) -> str:
    """Return how the query differs from its checkpoint; empty if that is not the cause."""
    if found := _TOPICS.search(text):
        return found[0]
    if found := _SOURCES.search(text):
        return f"the checkpoint has {found[1]} sources, and the query has {found[2]}"
    if found := _OPERATORS.search(text):
        return f"the checkpoint has the stateful operators {found[1]}, and the query has {found[2]}"
    if found := _SCHEMAS.search(text):
        return f"the {found[1]} of its state was {found[2]}, and is {found[3]} now"
    found = _INCOMPATIBLE.search(text)
    return text[found.start() :].splitlines()[0] if found else ""


def _is_analysis(error: BaseException) -> bool:
    """Return whether Spark rejects the query itself; excludes sources that could not reach their broker."""
    from pyspark.errors import AnalysisException, ParseException

    if not isinstance(error, AnalysisException | ParseException):
        return False
    raised = _RAISED.findall(str(error))
    return not raised or raised[-1] in (InvalidArgument.__name__, TopicNotFound.__name__)
