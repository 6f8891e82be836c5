"""The benchmarks of the bus measure what they say, beside the peers of the contract, and notice a wrong result."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks import bus, harness
from tests.unit.test_broker_benchmarks import missing

from headrace.bench.brokers import PublishPace
from headrace.bench.measure import WrongResult
from headrace.bench.payload import Payload
from headrace.bench.request_workloads import HeadraceRequests, asking

UNITS = {
    "request_reply_p50_ms": "ms",
    "request_reply_p99_ms": "ms",
    "publish_receive_p50_ms": "ms",
    "publish_receive_p99_ms": "ms",
    "switchboard_match_us": "µs",
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group with next to nothing to do."""
    whole = bus.benchmarks
    monkeypatch.setattr(bus, "benchmarks", lambda: whole(seconds=0.02, subscriptions=1000))


def lines_of(arguments: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    only = [word for name in UNITS for word in ("--only", name)]
    tiny = ["--samples", "1", "--seconds", "0.001", "--directory", str(place)]
    assert harness.main(["bus", *only, *arguments, *tiny]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("small")
def test_every_name_runs_and_prints_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = lines_of(["--subject", "headrace"], tmp_path, capsys)
    assert {line["name"].removeprefix("bus."): line["unit"] for line in lines} == UNITS
    assert all(line["median"] > 0 and not line["higher_is_better"] for line in lines)


def test_the_peers_of_the_contract_are_there() -> None:
    found = {name: {one.name for one in each.subjects} for each in bus.benchmarks() for name in each.figures}
    for name in UNITS:
        assert found[name] == ({"headrace"} if name == "switchboard_match_us" else {"headrace", "nats", "redis"})


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")  # others' clients have their ways
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("peer", ["redis", "nats"])
def test_a_peer_comes_through_its_checks(peer: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if lacking := missing(peer):
        pytest.skip(f"{peer} is not here: {lacking}")
    lines = lines_of(["--subject", peer], tmp_path, capsys)
    assert [line for line in lines if not line["median"]] == []


def test_a_wrong_reply_is_noticed(tmp_path: Path) -> None:
    class Wrong(HeadraceRequests):
        async def ask(
            self, subject: str, values: Sequence[bytes], pace: PublishPace
        ) -> tuple[list[float], list[bytes]]:
            latencies, replies = await super().ask(subject, values, pace)
            return latencies, [*replies[:-1], b"another"]

    subject = asking(Wrong(), Payload())
    assert subject.prepare is not None
    assert subject.finish is not None
    subject.prepare(str(tmp_path))
    try:
        with pytest.raises(WrongResult, match="not the one to its request"):
            subject.sample(str(tmp_path), 1)
    finally:
        subject.finish()
