"""Bytes on disk and in memory: segments, indexes and logs. The file formats are written down in FORMAT.md."""
