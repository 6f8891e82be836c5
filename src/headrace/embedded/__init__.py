"""The log without a server: a durable log in a directory, used from Python as one uses SQLite."""
