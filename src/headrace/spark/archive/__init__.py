"""The archive: stores old messages as Parquet files, which reads of a topic include where its log has been trimmed."""
