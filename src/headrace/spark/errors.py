"""The errors of Spark sessions, queries and pipelines."""

from headrace.model.errors import HeadraceError, InvalidArgument


class QueryFailed(HeadraceError):
    """A streaming query ended with an error."""

    code = "query_failed"


class CheckpointIncompatible(QueryFailed):
    """The checkpoint is of another query: it was changed in a way that its state or its offsets do not fit."""

    code = "checkpoint_incompatible"


class SourceLost(QueryFailed):
    """What a query was to read is not there any more."""

    code = "source_lost"


class PipelineNotFound(HeadraceError, LookupError):
    """The broker knows no pipeline of that name."""

    code = "pipeline_not_found"


class PipelineInUse(HeadraceError):
    """The pipeline runs already: a second driver of it would do everything twice."""

    code = "pipeline_in_use"
    retryable = True


class SparkMissing(HeadraceError):
    """Spark, or something that it needs, is not installed here."""

    code = "spark_missing"


class SessionNeeded(InvalidArgument):
    """The file uses Spark while it is read, and can be read only when there is a session."""

    code = "session_needed"


class InvalidStatement(InvalidArgument):
    """The SQL cannot be understood, or names what is not there."""

    code = "invalid_sql"


class PathInUse(InvalidArgument):
    """The output path already exists."""

    code = "path_in_use"
