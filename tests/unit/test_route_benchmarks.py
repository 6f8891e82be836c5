"""The benchmarks of routes measure what they say, beside RabbitMQ, and notice a wrong result."""

import json
from pathlib import Path

import pytest
from benchmarks import bus, bus_routes, harness
from tests.unit.test_broker_benchmarks import missing

from headrace.bench.measure import WrongResult
from headrace.bench.payload import Payload

NAMES = ("publish_one_by_one", "route_pattern_10", "route_jsonpath")


def lines_of(subject: str, place: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    only = [word for name in NAMES for word in ("--only", name)]
    tiny = ["--samples", "1", "--seconds", "0.001", "--directory", str(place)]
    assert harness.main(["bus", *only, "--subject", subject, *tiny]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_name_runs_and_prints_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = lines_of("headrace", tmp_path, capsys)
    assert {str(line["name"]).removeprefix("bus.") for line in lines} == set(NAMES)
    assert all(line["median"] and line["unit"] == "msg/s" and line["higher_is_better"] for line in lines)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")  # others' clients have their ways
def test_rabbitmq_comes_through_its_checks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if lacking := missing("rabbitmq"):
        pytest.skip(f"rabbitmq is not here: {lacking}")
    lines = lines_of("rabbitmq", tmp_path, capsys)
    assert [line for line in lines if not line["median"]] == []


def test_the_peers_of_the_contract_are_there() -> None:
    found = {name: {one.name for one in each.subjects} for each in bus.benchmarks() for name in each.figures}
    assert [found[name] for name in NAMES] == [{"headrace", "rabbitmq"}, {"headrace", "rabbitmq"}, {"headrace"}]


def test_a_missing_message_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = bus_routes.headrace_singles(Payload(), 2)
    monkeypatch.setattr(bus_routes, "_PATTERNS", ("sensors.#", "elsewhere.#"))
    monkeypatch.setattr(bus_routes, "_PATIENCE_S", 0.1)
    assert subject.prepare is not None
    assert subject.finish is not None
    subject.prepare(str(tmp_path))
    try:
        with pytest.raises(WrongResult, match="target-0-1"):
            subject.sample(str(tmp_path), 3)
    finally:
        subject.finish()


def test_documents_have_their_size() -> None:
    assert {len(bus_routes._document(price)) for price in range(101)} == {200}
