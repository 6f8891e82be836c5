"""Clients of others against a real server: curl, and schemathesis over the whole OpenAPI document."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
    return lines[0] if lines else {"partition": 0, "offset": 0, "timestamp": 0, "subject": ""}

@schemathesis.deserializer("text/event-stream")
def read_events(context, response):
    return response.content.decode()
'''

ALWAYS = ["2xx", "401", "403", "404", "409"]
"""What valid data may be answered with anywhere: something is missing, or is in the way."""
IN_THE_WAY = ("410", "412", "413", "416", "429", "502", "503", "504")
"""What it may be answered with where the document declares it: the state of the broker is in the way."""
_NAMES = "a name may be any text but for some characters, and one with a slash is of another tenant"
_TIMES = "a time in a query is RFC 3339, which has a calendar"
_RECEIVER = "the URL and the secrets of a receiver have grammars of their own, and so have its settings"
_TENANTS = "only sessions of the default tenant administer tenants, whatever Headrace-Tenant the schema allows"
_SECURITY = "roles have plain names, a binding names an identity or claims, and a token ends in the future"
_INTEGERS = "JSON Schema takes 1.0 for an integer, and the broker does not"
_SETTINGS = "settings depend on each other, and a query in them has a grammar of its own"
_STATE = "whether an offset, a version or a time can be used depends on what is stored"
_ENVELOPE = "a value must be a text if a header says so, and times are bounded where they are RFC 3339"
UNSAYABLE = {
    "POST /v1/topics": _SETTINGS,
    "PATCH /v1/topics/{topic}": _SETTINGS,
    "POST /v1/topics/{topic}/subscriptions": _SETTINGS,
    "PATCH /v1/topics/{topic}/subscriptions/{subscription}": _SETTINGS,
    "POST /v1/topics/{topic}/trims": _STATE,
    "POST /v1/topics/{topic}/subscriptions/{subscription}/resets": _STATE,
    "POST /v1/topics/{topic}/subscriptions/{subscription}/extensions": _STATE,
    "POST /v1/topics/{topic}/subscriptions/{subscription}/releases": _STATE,
    "POST /v1/topics/{topic}/subscriptions/{subscription}/leases": _STATE,
    "POST /v1/topics/{topic}/subscriptions/{subscription}/acks": _INTEGERS,
    "POST /v1/topics/{topic}/subscriptions/{subscription}/rejections": _INTEGERS,
    "GET /v1/topics/{topic}/offsets": _TIMES,
    "GET /v1/topics/{topic}/subscriptions/{subscription}/forecast": _TIMES,
    "GET /v1/topics/{topic}/subscriptions/{subscription}/messages": _TIMES,
    "DELETE /v1/topics/{topic}/messages/{id}": "schemathesis makes up its own If-Match, whatever the pattern",
    "GET /v1/topics/{topic}/keys/{key}/history": "only topics with key_versions have histories",
    "GET /v1/topics/{topic}/partitions/{partition}/messages": "two fields of a query exclude each other",
    "GET /v1/topics/{topic}/messages": "a position has each partition once",
    "GET /v1/tenants": _TENANTS,
    "POST /v1/tenants": _TENANTS,
    "GET /v1/tenants/{tenant}": _TENANTS,
    "PATCH /v1/tenants/{tenant}": _TENANTS,
    "DELETE /v1/tenants/{tenant}": _TENANTS,
    "GET /v1/tenants/{tenant}/usage": _TENANTS,
    "POST /v1/auth/bindings": _SECURITY,
    "POST /v1/auth/binding-removals": _SECURITY,
    "POST /v1/auth/tokens": _SECURITY,
    "PUT /v1/auth/roles/{name}": _SECURITY,
    "POST /v1/hub": "topics and callbacks are URLs, of which those of topics have the host of the broker",
    "POST /v1/groups/{group}/commits": _STATE,
    "POST /v1/groups/{group}/seeks": _STATE,
    "POST /v1/transactions": _STATE,
    "POST /v1/topics/{topic}/messages": _ENVELOPE,
    "POST /v1/topics/{topic}/jobs": _ENVELOPE,
    "POST /v1/subjects/{subject}/messages": _ENVELOPE,
    "GET /v1/subjects/{subject}/messages": _NAMES,
    "POST /v1/requests/{subject}": _NAMES,
    "POST /v1/route-explanations": _ENVELOPE,
    "POST /v1/routes": "patterns of subjects, regular expressions and JSONPaths have grammars of their own",
    "PUT /v1/routes/{name}": "patterns of subjects, regular expressions and JSONPaths have grammars of their own",
    "PATCH /v1/topics/{topic}/messages/{id}": "a change says at least one thing, and some exclude each other",
    "POST /v1/topics/{topic}/subscriptions/{subscription}/edits": "a change says at least one thing",
    "POST /v1/topics/{topic}/subscriptions/{subscription}/redrives": _STATE,
    "POST /v1/topics/{topic}/subscriptions/{subscription}/results": "details of errors are bounded in bytes",
    "PUT /v1/configuration/log-levels": "the scope broker has no pattern, and belongs to the default tenant",
    "PUT /v1/schedules/{name}": "crontab expressions and time zones have grammars of their own",
    "PUT /v1/services/{name}/instances/{instance}": _NAMES,
    "POST /v1/errors": "errors are bounded in bytes",
    "PUT /v1/webhooks/{name}": _RECEIVER,
    "PATCH /v1/webhooks/{name}": _RECEIVER,
}
"""Operations that refuse data with 422 which their schema allows, and what JSON Schema cannot say about it."""

OTHER_PROTOCOLS = ("/v1/native", "/v1/socket")
"""Their answer is another protocol, which the tests of upgrades speak."""
OF_A_CLUSTER = (
    "GET /v1/cluster",
    "POST /v1/cluster/moves",
    "POST /v1/cluster/nodes/{node}/drain",
    "POST /v1/cluster/upgrade",
)
"""The broker of these tests is not part of one, and says so with 501; the tests of clusters have them."""
LOCKS_OUT = ("PATCH /v1/auth",)
"""With security on, everything else would be refused; the tests of security have it."""


def is_name(parameter: Any) -> bool:
    """Whether a parameter is a text of which no pattern says how it looks."""
    schema = parameter["schema"]
    return schema.get("type") == "string" and not {"pattern", "enum"} & schema.keys()


def configuration(document: Any, *, is_fuzzing: bool) -> str:
    """What schemathesis is to accept, by operation: only what the document declares for it.

    When it makes up names, any operation may refuse one: no pattern tells which (_NAMES).
    """
    lines: list[str] = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name = f"{method.upper()} {path}"
            statuses = [*ALWAYS, *(status for status in IN_THE_WAY if status in operation["responses"])]
            if name in UNSAYABLE or (is_fuzzing and any(map(is_name, operation["parameters"]))):
                statuses.append("422")
            lines += ["[[operations]]", f"include-name = {json.dumps(name)}"]
            if path in OTHER_PROTOCOLS or name in LOCKS_OUT:
                lines.append("enabled = false")
                continue
            if name in OF_A_CLUSTER:
                statuses.append("501")
                lines.append('checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "501"]')
            lines.append(f"checks.positive_data_acceptance.expected-statuses = {json.dumps(statuses)}")
    return "\n".join(lines)


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
    client = HttpClient(server.url)
    document = client.get("/v1/openapi.json").json
    client.close()
    operations = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert operations >= UNSAYABLE.keys(), "an exception is about no operation"
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(configuration(document, is_fuzzing="fuzzing" in phases))
    path = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings), "run"]
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
