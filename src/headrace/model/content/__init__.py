"""Content queries: which messages of a batch have a value that a query asks for."""
