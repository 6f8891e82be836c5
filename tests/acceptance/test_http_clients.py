"""Clients of others against a real server: curl, and schemathesis over the whole OpenAPI document."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.http_client import HttpClient, HttpProcess, needs_http
from tests.known import ENVIRONMENT, quick_place

pytestmark = needs_http

HOOKS = '''
"""What schemathesis does not know: lines of JSON, and events."""
import json
import schemathesis

@schemathesis.serializer("application/x-ndjson")
def write_lines(context, value):
    return value if isinstance(value, bytes) else json.dumps(value).encode()

@schemathesis.deserializer("application/x-ndjson")
def read_lines(context, response):
    lines = [json.loads(line) for line in response.content.splitlines() if line]
    return lines[0] if lines else {"partition": 0, "offset": 0, "timestamp": 0}

@schemathesis.deserializer("text/event-stream")
def read_events(context, response):
    return response.content.decode()
'''

CONFIGURATION = """
[checks.positive_data_acceptance]
# What a schema cannot say is refused with these: two fields that exclude each other, a message that is gone.
expected-statuses = ["2xx", "401", "403", "404", "409", "410", "412", "413", "416", "422", "429"]
"""


@pytest.fixture(scope="module")
def server() -> Iterator[HttpProcess]:
    with quick_place() as place:
        served = HttpProcess(place / "data", "--http-stream-seconds", "0.1s", "--http-wait-seconds-max", "0.05s")
        yield served
        served.kill()


def curl(*arguments: str, stdin: bytes = b"") -> bytes:
    command = ["curl", "--silent", "--show-error", "--max-time", "30", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=True).stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl: install it")
def test_curl_publishes_reads_and_works(server: HttpProcess) -> None:
    url, json_type = server.url, ("-H", "Content-Type: application/json")
    receipt = json.loads(curl(*json_type, "-d", '{"value": {"id": 1}}', f"{url}/v1/topics/curl/messages"))
    assert receipt == {"partition": 0, "offset": 0, "count": 1, "durability": "synced"}
    lines = b'{"value": 2}\n{"value": 3}\n'
    types = ("-H", "Content-Type: application/x-ndjson", "--data-binary", "@-")
    assert json.loads(curl(*types, f"{url}/v1/topics/curl/messages", stdin=lines))["count"] == 2
    page = json.loads(curl("--compressed", f"{url}/v1/topics/curl/partitions/0/messages"))
    assert [one["value"] for one in page["messages"]] == [{"id": 1}, 2, 3]
    events = curl("-N", "-H", "Accept: text/event-stream", f"{url}/v1/topics/curl/messages?start=earliest")
    assert events.count(b"\ndata: ") == 3
    assert b"\nid: 0:3\ndata: " in events
    leased = json.loads(curl("-X", "POST", f"{url}/v1/topics/curl/subscriptions/work/leases"))["messages"]
    places = {"messages": [{name: leased[0][name] for name in ("partition", "offset", "lease")}]}
    acked = curl(*json_type, "-d", json.dumps(places), f"{url}/v1/topics/curl/subscriptions/work/acks")
    assert json.loads(acked) == {}
    large = json.dumps({"value": "x" * 200_000})  # curl asks with Expect: 100-continue
    assert (
        json.loads(curl(*json_type, "-d", "@-", f"{url}/v1/topics/curl/messages", stdin=large.encode()))["offset"] == 3
    )


@pytest.mark.skipif(find_spec("openapi_spec_validator") is None, reason="openapi-spec-validator is not installed")
def test_the_document_is_valid(server: HttpProcess) -> None:
    from openapi_spec_validator import OpenAPIV31SpecValidator

    client = HttpClient(server.url)
    document = client.get("/v1/openapi.json").json
    client.close()
    assert document["openapi"].startswith("3.1")
    OpenAPIV31SpecValidator(document).validate()


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
@pytest.mark.parametrize(
    "phases", ["examples,coverage", pytest.param("examples,coverage,fuzzing,stateful", marks=pytest.mark.long)]
)
def test_schemathesis_finds_nothing(server: HttpProcess, tmp_path: Path, phases: str) -> None:
    (tmp_path / "http_hooks.py").write_text(HOOKS)
    configuration = tmp_path / "schemathesis.toml"
    configuration.write_text(CONFIGURATION)
    path = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(configuration), "run"]
    command += [f"{server.url}/v1/openapi.json", "--checks", "all", "--no-color", "--seed", "7", "-n", "20"]
    command += ["--phases", phases]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": path, "SCHEMATHESIS_HOOKS": "http_hooks"},
        capture_output=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()[-8000:] + done.stderr.decode()[-2000:]
    assert server.process is not None
    assert server.process.poll() is None
