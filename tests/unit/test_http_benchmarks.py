"""The benchmarks of HTTP run, and tell what they say."""

import json
from pathlib import Path

import pytest
from benchmarks import harness, http
from tests.http_client import needs_http

UNITS = {
    "http.publish_single_rps": ("requests/s", True),
    "http.publish_batch": ("msg/s", True),
    "http.sse_fanout_lag_p50_ms": ("ms", False),
    "http.sse_fanout_lag_p99_ms": ("ms", False),
    "http.http_rss_mb": ("MB", False),
}


@needs_http
def test_every_name_of_http_runs_and_prints_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = http.benchmarks
    monkeypatch.setattr(http, "benchmarks", lambda: whole(readers=3, streamed=40))
    own = ["--subject", "headrace", "--subject", "bare_uvicorn"]
    assert harness.main(["http", *own, "--samples", "1", "--seconds", "0.01", "--directory", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["name"]: (line["unit"], line["higher_is_better"]) for line in lines} == UNITS
    subjects = {line["subject"] for line in lines if line["name"] == "http.publish_single_rps"}
    assert subjects == {"headrace", "bare_uvicorn"}
    assert all(line["median"] > 0 for line in lines)
