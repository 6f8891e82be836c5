"""Plug-ins are found by group and name, imported only when named, and a bad one is refused with its package."""

import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest
from tests.installed_plugins import on_path, write_package

import headrace
from headrace import plugins
from headrace.errors import PluginUnavailable
from headrace.plugins import (
    BUILT_IN,
    GROUPS,
    SINKS,
    find_plugin,
    forget_plugins,
    list_plugins,
    load_plugin,
    plugin_names,
)

GOOD = """
class Sink:
    api = 1
"""


def sinks(**entries: str) -> dict[str, dict[str, str]]:
    return {SINKS: entries}


def refused(name: str) -> PluginUnavailable:
    with pytest.raises(PluginUnavailable) as raised:
        load_plugin(SINKS, name)
    return raised.value


def test_a_plug_in_is_found_by_name_and_loaded_once(tmp_path: Path) -> None:
    with on_path(write_package(tmp_path, "good-sinks", sinks(good="good_sinks:Sink"), GOOD)):
        found = find_plugin(SINKS, "good")
        assert found == plugins.Plugin(SINKS, "good", "good_sinks:Sink", "good-sinks", "1.0")
        assert found.package == "good-sinks 1.0"
        assert "good_sinks" not in sys.modules, "finding does not import"
        assert load_plugin(SINKS, "good") is load_plugin(SINKS, "good")
        assert "good" in plugin_names(SINKS)
    assert find_plugin(SINKS, "good") is None


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with on_path(write_package(tmp_path, "good-sinks", sinks(good="good_sinks:Sink"), GOOD)):
        raised = refused("god")
    assert "no plug-in 'god' in headrace.sinks; installed are: " in str(raised)
    assert "good" in str(raised)
    assert raised.details == {"group": SINKS, "name": "god"}


def test_one_that_raises_is_named_with_its_package_and_the_log_has_the_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = "def fail():\n    raise RuntimeError('out of order')\nfail()\n"
    with on_path(write_package(tmp_path, "bad-sinks", sinks(bad="bad_sinks:Sink"), source)):
        raised = refused("bad")
    text = "the plug-in 'bad' of bad-sinks 1.0 (bad_sinks:Sink) cannot be loaded: RuntimeError: out of order"
    assert str(raised).startswith(text)
    assert "in fail" in caplog.text
    assert (raised.details["distribution"], raised.details["version"]) == ("bad-sinks", "1.0")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("Sink = None.nothing", "AttributeError"),
        ("x = 1", "has no attribute 'Sink'"),
        ("import package_that_is_not_there", "No module named 'package_that_is_not_there'"),
        ("class Sink: pass", "add `api = 1` to it"),
        ("class Sink: api = 2", "is for version 2 of the plug-in interface, and this Headrace has 1"),
        ("class Sink: api = '1'", "is for version '1'"),
    ],
)
def test_one_that_cannot_be_used_says_why(source: str, expected: str, tmp_path: Path) -> None:
    with on_path(write_package(tmp_path, "bad-sinks", sinks(bad="bad_sinks:Sink"), source)):
        raised = refused("bad")
    assert expected in str(raised)
    assert "bad-sinks 1.0" in str(raised)


def test_two_packages_with_one_name_are_both_named(tmp_path: Path) -> None:
    one = write_package(tmp_path / "1", "one-sinks", sinks(good="one_sinks:Sink"), GOOD)
    two = write_package(tmp_path / "2", "two-sinks", sinks(good="two_sinks:Sink", other="two_sinks:Sink"), GOOD)
    with on_path(one, two):
        with pytest.raises(PluginUnavailable, match=r"one-sinks 1\.0 and two-sinks 1\.0; uninstall all but one"):
            load_plugin(SINKS, "good")
        assert load_plugin(SINKS, "other").api == 1, "other names of the same packages are as they were"


def test_a_module_can_be_a_plug_in(tmp_path: Path) -> None:
    with on_path(write_package(tmp_path, "whole-module", sinks(whole="whole_module"), "api = 1")):
        assert load_plugin(SINKS, "whole").__name__ == "whole_module"


def test_a_package_cannot_take_the_place_of_a_built_in_one(tmp_path: Path) -> None:
    group = plugins.GATEWAYS
    with on_path(write_package(tmp_path, "false-gateway", {group: {"headrace": "false_gateway:Sink"}}, GOOD)):
        assert load_plugin(group, "headrace").__module__ == "headrace.gateways.native.gateway"
        assert {one.distribution for one in list_plugins(group) if one.name == "headrace"} == {
            "headrace",
            "false-gateway",
        }


def test_the_built_in_ones_are_those_of_the_package_and_all_load() -> None:
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    declared = {group: dict(names) for group, names in project["entry-points"].items()}
    assert {group: names for group, names in BUILT_IN.items() if names} == declared
    for group in GROUPS:
        for name in BUILT_IN[group]:
            assert load_plugin(group, name).api == plugins.API


def test_metadata_is_read_only_for_names_that_are_not_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: read.append(group) or [])
    forget_plugins()
    with headrace.open(":memory:") as bus:
        bus.producer(serializer="json")
        assert not read
        assert find_plugin(SINKS, "unknown") is find_plugin(SINKS, "also-unknown") is None
    assert read == [SINKS], "and once for all names"
    forget_plugins()
