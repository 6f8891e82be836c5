"""The documentation is whole: every page can be reached, every link leads somewhere, every table is up to date."""

import re
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripts import diagrams, reference, site_pages
from tests.pages import ROOT, links

import headrace.spark
import headrace.testing
from headrace.cli.command_list import whole_parser
from headrace.spark.sink import options as sink_options
from headrace.spark.source import options as source_options

DOCS = ROOT / "docs"
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\nhooks:")[0]
LISTED = re.findall(r"([\w./-]+(?:\.md|/))$", NAVIGATION, re.MULTILINE)
ADRS = sorted(path.relative_to(ROOT).as_posix() for path in (DOCS / "adr").glob("*.md"))
WRITTEN = sorted([*DOCS.rglob("*.md"), *(ROOT / source for source in site_pages.PAGES.values())])


def test_the_navigation_has_every_page() -> None:
    pages = {page for name in LISTED for page in (_folder(name) if name.endswith("/") else [name])}
    sources = {ROOT / site_pages.source_of(page) for page in pages}
    assert sources == set(WRITTEN)


def _folder(name: str) -> list[str]:
    return [page.relative_to(DOCS).as_posix() for page in (DOCS / name).glob("*.md")]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in _anchors(target.read_text(encoding="utf-8")), f"{link} leads to no heading"


def _anchors(page: str) -> set[str]:
    """The names of a page's headings, as they are in links."""
    titles = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("name", diagrams.PICTURES)
def test_pictures_are_up_to_date(name: str) -> None:
    drawn = diagrams.PICTURES[name]()
    assert (diagrams.IMAGES / name).read_text(encoding="utf-8") == drawn, "run scripts/diagrams.py"


def test_links_between_files_become_links_between_pages() -> None:
    def on_the_site(page: str, link: str) -> str:
        shown = SimpleNamespace(file=SimpleNamespace(src_uri=page))
        return site_pages.on_page_markdown(f"[there]({link})", shown)

    assert (
        on_the_site("ARCHITECTURE.md", "../src/headrace/storage/FORMAT.md#batch") == "[there](reference/files.md#batch)"
    )
    assert on_the_site("reference/protocol.md", "../storage/FORMAT.md") == "[there](files.md)"
    assert on_the_site("how-to/replay.md", "../reference/topics.md") == "[there](../reference/topics.md)"
    assert on_the_site("CONTRIBUTING.md", "docs/GLOSSARY.md") == "[there](GLOSSARY.md)"
    assert on_the_site("index.md", "https://example.org/a.md") == "[there](https://example.org/a.md)"


@pytest.mark.parametrize("page", reference.pages(), ids=lambda page: page.name)
def test_generated_tables_are_up_to_date(page) -> None:
    text = page.read_text(encoding="utf-8")
    assert reference.filled(text) == text, "run: bin/docs write"


def test_what_is_generated_is_used() -> None:
    used = re.findall(r"<!-- generated: (\w+)", "".join(page.read_text(encoding="utf-8") for page in WRITTEN))
    assert set(used) == set(reference.PARTS)


def test_every_command_is_on_one_page() -> None:
    assert sorted(reference.commands_named()) == sorted(reference.commands_known())


def test_every_error_code_has_advice(record_property: Callable[[str, object], None]) -> None:
    codes = {kind.code for _, kind in reference.error_classes()} | {"usage_error", "system_error"}
    advised = [code for section in reference.ADVICE.values() for code in section]
    assert len(advised) == len(set(advised))
    assert not codes - set(advised), "edit scripts/error_advice.toml, then run: bin/docs write"
    record_property("advice for error codes that do not exist", sorted(set(advised) - codes))


COMMAND = re.compile(r"`(headrace [a-z][^`]*)`")


def test_the_commands_that_advice_names_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = {"NAME", "TOPIC", "ID", "FILE", "DATA", "N", "COMMAND"}
    for section in reference.ADVICE.values():
        for code, advice in section.items():
            for command in COMMAND.findall(" ".join(advice.values())):
                path = list(takewhile(lambda word: word not in words and word[0] != "-", command.split()[1:]))
                at = whole_parser()
                for word in path:
                    assert word in reference.subcommands(at), f"{code}: {command}"
                    at = reference.subcommands(at)[word]
                reference.subcommands(at)  # which adds the arguments
                options = {name for action in at._actions for name in action.option_strings}
                assert set(re.findall(r"--[\w-]+", command)) <= options | {"--help", "--version"}, f"{code}: {command}"


def test_the_site_loads_nothing_from_elsewhere() -> None:
    """The offline plugin takes its script from the network unless the settings name another; fonts are off, too."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (script,) = re.findall(r"polyfills: \[(.*iframe-worker.*)\]", settings)
    assert (DOCS / script).exists()
    assert "font: false" in settings
    assert "navigation.footer" in settings  # previous and next on each page


NAMED = re.compile(r"`((?:[\w-]+/)*\w+\.(?:py|sh|md))`")
NOT_FILES = {"script.py"}


@pytest.mark.parametrize("page", ["docs/ARCHITECTURE.md", "docs/GLOSSARY.md", "CONTRIBUTING.md", *ADRS])
def test_the_files_that_a_page_names_exist(page: str) -> None:
    for name in NAMED.findall((ROOT / page).read_text(encoding="utf-8")):
        found = [folder for folder in (ROOT / "src" / "headrace", ROOT) if (folder / name).exists()]
        found += [] if "/" in name else (ROOT / "src" / "headrace").rglob(name)
        assert found or name in NOT_FILES, f"{page} names {name}"


def test_the_files_that_the_picture_of_the_flow_names_exist() -> None:
    for title, steps in diagrams.FLOWS:
        for _, heading, files in steps:
            for file in files:
                assert (ROOT / "src" / "headrace" / file).exists(), f"{title}, {heading}: {file}"


DESCRIBED = re.compile(r"^::: (headrace[\w.]*)$", re.MULTILINE)
ELSEWHERE = {"TopicSettings": "topics.md", "SubscriptionSettings": "subscriptions.md"}
"""Public names whose entry is a table of settings."""


def described() -> set[str]:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    return set(DESCRIBED.findall(pages))


def test_the_reference_describes_every_public_name() -> None:
    errors = {kind.__name__ for _, kind in reference.error_classes()}
    wanted = {name for name in headrace.__all__ if name not in errors | set(ELSEWHERE) and not name.startswith("__")}
    assert wanted - {"errors"} <= {name.removeprefix("headrace.") for name in described()}
    assert {f"headrace.spark.{name}" for name in headrace.spark.__all__} <= described()


def test_what_the_reference_describes_exists() -> None:
    for name in described():
        at: Any = headrace
        for word in name.split(".")[1:]:
            assert hasattr(at, word), f"the reference describes {name}"
            at = getattr(at, word)


def test_every_option_of_spark_is_documented() -> None:
    page = (DOCS / "how-to" / "spark.md").read_text(encoding="utf-8")
    for options in (source_options, sink_options):
        missing = [name for name in options._NAMES if f"`{name}`" not in page]
        assert not missing, f"docs/how-to/spark.md lacks the options {missing}"
