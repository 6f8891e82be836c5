"""Sample data is what it says; and the page about the pipelines shows commands that exist."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from tests.spark import ready
from tests.spark.conftest import SparkBroker
from tests.spark.ready import PIPELINES, START, made, samples

from headrace.spark.pipelines.loader import load

PAGES = (PIPELINES.parent / "docs" / "how-to" / "stream-processing.md", PIPELINES / "README.md")


@pytest.mark.parametrize("kind", samples.KINDS)
def test_the_same_seed_gives_the_same(kind: str) -> None:
    found = made(kind, 500, 1.0)
    assert found == made(kind, 500, 1.0)
    other = samples.messages(kind, seed=2, start=START, spacing_s=1.0, faults=ready.FAULTS)
    assert found != list(itertools.islice(other, 500))


@pytest.mark.parametrize("kind", [kind for kind in samples.KINDS if kind != "customers"])
def test_what_is_wrong_with_them(kind: str) -> None:
    found = made(kind, 4000, 1.0)
    times = [message.at for message in found]
    late = [(before - at).total_seconds() for at, before in zip(times, itertools.accumulate(times, max), strict=True)]
    assert any(0 < seconds <= ready.FAULTS.late_s for seconds in late)
    assert any(seconds > ready.FAULTS.lost_s[0] for seconds in late)
    assert len({message.value for message in found}) < len(found), "none comes twice"
    assert any(ready.readable(message) is None for message in found)
    clean = made(kind, 4000, 1.0, samples.NO_FAULTS)
    assert [message.at for message in clean] == sorted(message.at for message in clean)
    assert all(ready.readable(message) for message in clean)


def test_publishing(broker: SparkBroker, topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    samples.main(
        ["clicks", "--topic", topic, "--count", "25", "--rate", "1000", "--connect", broker.address, "--clean"]
    )
    assert capsys.readouterr().out == f"published 25 messages to {topic}\n"
    clicks = [json.loads(value) for value in ready.values(broker.bus, topic)]
    assert [click["id"] for click in clicks] == [f"c{number}" for number in range(25)]


def _commands() -> list[tuple[str, list[str]]]:
    blocks = [block for page in PAGES for block in re.findall(r"```(?:bash|sh)\n(.*?)```", page.read_text(), re.DOTALL)]
    lines = [line for block in blocks for line in block.splitlines()]
    return [(line, shlex.split(line.rstrip("& "))) for line in lines]


def test_the_pages_commands() -> None:
    published, run = set(), set()
    for line, words in _commands():
        if "samples.py" in line:
            published.add(samples._arguments(words[2:]).kind)
        elif "pipeline run" in line:
            run.add(Path(words[-1]).name)
            assert load(str(PIPELINES.parent / words[-1]))
    assert published == set(samples.KINDS) - {"traces"}
    assert run == {path.name for path in PIPELINES.glob("*.py") if "@pipeline(" in path.read_text()} - {
        "trace_latency.py"
    }


def test_the_pages_topics() -> None:
    """Every topic that a pipeline writes is told of."""
    told = "".join(page.read_text() for page in PAGES)
    written = {
        name
        for path in PIPELINES.glob("*.py")
        for name in re.findall(r'(?:to_topic|unusable)\(.*?, "([a-z0-9-]+)"', path.read_text())
    }
    assert len(written) > 10
    assert {name for name in written if f"`{name}`" not in told} <= {name for name in written if name.endswith("-dead")}


def test_the_pages_handler() -> None:
    """The page has the file's code."""
    page = PAGES[0].read_text()
    shown = re.search(r'```python title="act_on_alerts.py"\n(.*?)```', page, re.DOTALL)
    assert shown is not None
    file = (PIPELINES / "act_on_alerts.py").read_text()
    code = [line for line in file.splitlines() if line.strip() and not line.strip().startswith(("#", '"""'))]
    assert [line for line in shown[1].splitlines() if line.strip() and line not in code] == []
