"""The source: topics as DataFrames, batch and streaming."""
