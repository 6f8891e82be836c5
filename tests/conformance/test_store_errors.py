"""What people are told who have made a mistake with a store: one line, and what to do."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.store_servers import PostgresServer, RedisServer, SeaweedServer, StoreServer, running

from headrace.cluster.store_list import open_store
from headrace.model.errors import StoreUnavailable
from headrace.storage.stores.self_test import qualify_store


def told(url: str, environment: dict[str, str]) -> str:
    """What is said when a node starts with such a store."""
    store = open_store(url, environment=environment)
    try:
        with pytest.raises(StoreUnavailable) as caught:
            qualify_store(store, "trading", "n")
    finally:
        store.close()
    assert "\n" not in str(caught.value)
    return str(caught.value)


Mistake = Callable[[str, dict[str, str]], tuple[str, dict[str, str]]]
MISTAKES: list[tuple[Callable[[Path], StoreServer], list[tuple[Mistake, str]]]] = [
    (
        PostgresServer,
        [
            (lambda url, _: (url, {"PGPASSWORD": "wrong"}), "set PGPASSWORD"),
            (lambda url, secret: (url.replace("/postgres", "/none"), secret), "create the database"),
        ],
    ),
    (
        RedisServer,
        [
            (lambda url, _: (url, {}), "set REDIS_PASSWORD"),
            (lambda url, _: (url, {"REDIS_PASSWORD": "wrong"}), "set REDIS_PASSWORD"),
            (lambda url, secret: (url.replace("/0", "/99"), secret), "fewer databases"),
        ],
    ),
    (
        SeaweedServer,
        [
            (lambda url, _: (url, {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}), "refused"),
        ],
    ),
]


@pytest.mark.parametrize(("server", "mistakes"), MISTAKES, ids=["postgresql", "redis", "s3"])
def test_mistakes_are_told_in_one_line(
    server: Callable[[Path], StoreServer], mistakes: list[tuple[Mistake, str]]
) -> None:
    with running(server) as started:
        for mistake, advice in mistakes:
            assert advice in told(*mistake(started.url, started.environment))


def test_missing_credentials_of_s3_are_told_without_what_the_driver_tried() -> None:
    said = told("s3://bucket/prefix?timeout=2", {})
    # Where the metadata service of a machine answers nothing, the driver goes on without credentials.
    assert "set AWS_ACCESS_KEY_ID" in said or "s3.us-east-1.amazonaws.com" in said
    assert "169.254" not in said


class WithoutBuckets(BaseHTTPRequestHandler):
    """Answers as S3 does when there is no such bucket; SeaweedFS makes one instead."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>"
        self.send_response(404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_bucket_that_is_not_there_is_told_in_one_line() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), WithoutBuckets) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"s3://none/store?endpoint=http://127.0.0.1:{server.server_port}&region=us-east-1"
            said = told(url, {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"})
        finally:
            server.shutdown()
            thread.join()
    assert "there is no such bucket: create it" in said
