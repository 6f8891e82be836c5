"""The archive: old messages as Parquet files, which reads of the topic go on to where the log begins later."""
