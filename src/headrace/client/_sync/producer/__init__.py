"""Publishing: accumulating, sending, metadata, partitioning, serializing, transactions."""
