"""`headrace publish --reply`: publishes jobs and prints what their handlers return."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import headrace
from headrace.cli.main import main
from headrace.server import EmbeddedServer


@pytest.fixture
def url() -> Iterator[str]:
    """A broker with a worker."""
    server = EmbeddedServer(":memory:", host="127.0.0.1", port=0)
    host, port = server._server.addresses[0]
    address = f"headrace://{host}:{port}"
    app = headrace.App(address)

    @app.on("jobs")
    def handle(job: Any) -> Any:
        if job.value == b"bad":
            raise headrace.Reject("not for us")
        return {b"bytes": b"\xff", b"text": "grün"}.get(job.value, {"got": job.value.decode()})

    thread = threading.Thread(target=app.run, kwargs={"stop_on_signals": False})
    thread.start()
    yield address
    app.stop()
    thread.join()
    server.close()


def test_results_are_printed_in_order(url: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with headrace.connect(url) as bus:
        bus.create_topic("jobs")
    assert main(["publish", "jobs", "one", "text", "bytes", "--key", "k", "--reply", "--connect", url]) == 0
    assert capfdbinary.readouterr().out.decode().splitlines() == ['{"got":"one"}', "grün", "\\xff"]
    assert main(["publish", "jobs", "one", "bytes", "--reply", "--json", "--connect", url]) == 0
    first, second = map(json.loads, capfdbinary.readouterr().out.splitlines())
    assert first["result"] == {"got": "one"}
    assert second["result_base64"] == "/w=="
    with headrace.connect(url) as bus:
        assert bus.job_result(first["job"]).result(timeout=30) == {"got": "one"}


def test_a_job_that_fails_is_an_error(url: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["publish", "jobs", "bad", "--reply", "--json", "--connect", url]) == 1
    error = json.loads(capfdbinary.readouterr().err.splitlines()[-1])["error"]
    assert (error["code"], error["message"]) == ("job_failed", "not for us")


def test_a_result_that_does_not_come_in_time_is_an_error(url: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["publish", "nobody", "x", "--reply", "--timeout", "100ms", "--connect", url]) == 1
    assert b"[timeout]" in capfdbinary.readouterr().err
    assert main(["publish", "jobs", "x", "--reply", "--expected-offset", "0", "--connect", url]) == 2
