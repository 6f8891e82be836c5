"""The sink `sqlite:///PATH`: stores messages in the table `messages`, each once."""

import sqlite3
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from headrace.model.errors import InvalidArgument

CREATE = (
    "CREATE TABLE IF NOT EXISTS messages (topic TEXT, partition INTEGER, offset INTEGER, timestamp INTEGER, "
    "key BLOB, value BLOB, PRIMARY KEY (topic, partition, offset))"
)


class SqliteSink:
    """Inserts messages into a database; one that is delivered again is recognised by its offset."""

    api = 1

    def __init__(self, url: str) -> None:
        path = unquote(urlsplit(url).path)
        if not path.startswith("/"):
            raise InvalidArgument(f"the URL of a database is sqlite:///absolute/path, not {url}")
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False)
        with self._database:
            self._database.execute(CREATE)

    def deliver(self, messages: Sequence[Any]) -> None:
        """Insert messages in one transaction."""
        rows = [(each.topic, each.partition, each.offset, each.timestamp, each.key, each.value) for each in messages]
        with self._lock, self._database:
            self._database.executemany("INSERT OR IGNORE INTO messages VALUES (?, ?, ?, ?, ?, ?)", rows)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()
