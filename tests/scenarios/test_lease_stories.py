"""Stories of leased subscriptions, told in leases/*.txt: what happens, a line of dashes, and what comes of it.

Lines with # are for the reader. HEADRACE_REWRITE_STORIES=1 writes down what comes of it now; read what `git diff` says.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.scenarios.lease_stage import Stage
from tests.scenarios.test_group_stories import Scene, parse, written

STORIES = sorted((Path(__file__).parent / "leases").glob("*.txt"))


def played(scenes: list[Scene], directory: Path) -> Iterator[Scene]:
    """The scenes with what comes of them."""
    with Stage(directory) as stage:
        for scene in scenes:
            yield Scene(scene.told, [line for event in scene.events for line in stage.play(event)])


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path, tmp_path: Path) -> None:
    scenes = list(parse(path.read_text(encoding="utf-8")))
    outcome = list(played(scenes, tmp_path))
    if os.environ.get("HEADRACE_REWRITE_STORIES"):
        path.write_text(written(outcome), encoding="utf-8")
        return
    for scene, came in zip(scenes, outcome, strict=True):
        assert came.expected == scene.expected, f"in {path.name}, after {scene.events[-1]!r}"
    assert written(scenes) == path.read_text(encoding="utf-8")


def test_there_are_stories() -> None:
    assert len(STORIES) >= 10


def test_a_wrong_story_is_noticed(tmp_path: Path) -> None:
    story = "publish jobs a\n----\na is jobs/0/0\n\nlease alice jobs\n----\nalice gets b, until 30s\n"
    scenes = list(parse(story))
    assert written(scenes) == story
    first, second = played(scenes, tmp_path)
    assert first == scenes[0]
    assert second.expected == ["alice gets a, until 30s"]
