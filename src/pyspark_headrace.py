"""What Spark finds by itself: it imports every module named `pyspark_*` and takes its `DefaultSource`."""

from headrace.spark.datasource import HeadraceDataSource as DefaultSource

__all__ = ["DefaultSource"]
