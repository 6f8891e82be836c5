"""The plug-ins do what Headrace expects of them: its conformance checks, and what is special to each."""

import socket
import sqlite3
from pathlib import Path

from headrace.testing import check_gateway, check_middleware, check_sink
from headrace_example.sqlite_sink import SqliteSink
from headrace_example.uppercase import UppercaseMiddleware


def test_the_gateway_speaks_text() -> None:
    def talk(url: str) -> None:
        host, _, port = url.removeprefix("text://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            lines = connection.makefile("r", encoding="utf-8", newline="\n")
            connection.sendall(b"PUBLISH jobs first\n")
            assert lines.readline() == "OK 0\n"
            connection.sendall(b"FETCH jobs 0\n")
            assert lines.readline() == "MESSAGE 0 first\n"
            lines.close()

    check_gateway("text://127.0.0.1:0", talk)


def test_the_middleware_keeps_to_its_columns() -> None:
    check_middleware(UppercaseMiddleware, wrong_options={"kyes": True})
    check_middleware(UppercaseMiddleware, {"keys": True})


def test_the_sink_stores_each_message_once(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    check_sink(SqliteSink, f"sqlite://{path}")
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM messages").fetchone() == (4,)
    database.close()
