"""Pipelines: functions and SQL files that run as streaming queries, under a supervisor or in the foreground."""

from headrace.spark.pipelines.definition import pipeline

__all__ = ["pipeline"]
