"""The settings of a server: where they come from, which ones count, and what is said when one is wrong."""

import os
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.broker.settings import BrokerSettings
from headrace.cli.configuration import FIELDS, TOPIC_FIELDS, Configuration, configure
from headrace.cli.setting_options import field_explanations
from headrace.gateways.addresses import parse_listen_address
from headrace.model.errors import InvalidArgument
from headrace.server import DEFAULT_HTTP_ADDRESS, ServerSettings, missing_packages, server_settings
from headrace.server.gateway_list import listen_addresses


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing is set but the home directories."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path / "share")}


def configured(environ: dict[str, str], config: str | None = None, *topic: str, **flags: str) -> Configuration:
    return configure(flags, dict(one.split("=") for one in topic), config, environ)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "headrace.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def wrong(environ: dict[str, str], config: str | None = None, *topic: str, **flags: str) -> str:
    with pytest.raises(InvalidArgument) as caught:
        configured(environ, config, *topic, **flags)
    return str(caught.value)


def test_without_a_word_there_are_defaults(home: dict[str, str], tmp_path: Path) -> None:
    found = configured(home)
    http_address = "" if missing_packages() else DEFAULT_HTTP_ADDRESS
    assert found.settings == ServerSettings(data=f"{tmp_path}/share/headrace", http_address=http_address)
    assert found.settings.socket_path == f"{tmp_path}/share/headrace/headrace.sock"
    assert found.source("port") == "default"
    assert configured({}).settings.data == os.path.expanduser("~/.local/share/headrace")


def test_flags_come_before_the_environment_that_before_the_file_that_before_defaults(
    home: dict[str, str], tmp_path: Path
) -> None:
    path = written(tmp_path, "port = 1\nheartbeat_ms = 101\nhost = 'f'\n[topic]\npartitions = 1\nretain_bytes = 11\n")
    environ = {**home, "HEADRACE_PORT": "2", "HEADRACE_HEARTBEAT_MS": "102", "HEADRACE_TOPIC_PARTITIONS": "2"}
    found = configured(environ, path, "partitions=3", port="3")
    settings, topic = found.settings, found.settings.broker().topic
    assert (settings.port, settings.heartbeat_ms, settings.host) == (3, 102, "f")
    assert (topic.partitions, topic.retain_bytes) == (3, 11)
    assert found.source("port") == "flag --port"
    assert found.source("heartbeat_ms") == "environment HEADRACE_HEARTBEAT_MS"
    assert found.source("host") == f"file {path}"
    assert found.source("topic.partitions") == "flag --topic partitions=3"
    assert found.source("drain_seconds") == "default"


def test_file_is_named_by_flag_by_variable_or_lies_where_files_lie(home: dict[str, str], tmp_path: Path) -> None:
    path = written(tmp_path, "port = 1")
    assert configured({**home, "HEADRACE_CONFIG": path}).settings.port == 1
    usual = tmp_path / "config" / "headrace" / "headrace.toml"
    usual.parent.mkdir(parents=True)
    usual.write_text("port = 2")
    assert (configured(home).settings.port, configured(home).file) == (2, str(usual))
    assert configured(home, path).file == path
    assert "--config" in wrong(home, str(tmp_path / "gone.toml"))
    assert "HEADRACE_CONFIG" in wrong({**home, "HEADRACE_CONFIG": str(tmp_path / "gone.toml")})


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("auto_create_topics", "no", False),
        ("auto_create_topics", "True", True),
        ("receive_bytes_max", "64MiB", 64 << 20),
        ("drain_seconds", "2m", 120.0),
        ("drain_seconds", "0", 0.0),
        ("transactions_kept_seconds", "7d", 604800.0),
        ("unix_socket", "", ""),
        ("host", "", ""),
        ("data", ":memory:", ":memory:"),
    ],
)
def test_text_is_read_with_units(name: str, text: str, content: object, home: dict[str, str]) -> None:
    variable = {f"HEADRACE_{name.upper()}": text}
    assert getattr(configured({**home, **variable}).settings, name) == content
    assert getattr(configured(home, None, **{name: text}).settings, name) == content


def test_paths_in_a_file_count_from_the_file(
    home: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "data = 'here'\nunix_socket = '/run/a.sock'")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert configured(home, path).settings.data == f"{tmp_path}/here"
    assert configured(home, path).settings.socket_path == "/run/a.sock"
    assert configured(home, None, data="here").settings.data == f"{elsewhere}/here"
    assert configured(home, None, data="~/x").settings.data == os.path.expanduser("~/x")


@pytest.mark.parametrize("given", [{"unix_socket": ""}, {"data": ":memory:"}])
def test_a_broker_that_nobody_could_reach_is_refused(home: dict[str, str], given: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match=r"host, unix_socket and listen are all empty.*flag --host"):
        configured(home, None, host="", **given)
    assert configured({**home, "HEADRACE_UNIX_SOCKET": "/run/a.sock"}, None, host="", data=":memory:").settings
    with pytest.raises(InvalidArgument, match="nobody could reach the broker"):
        ServerSettings(**{"data": "x", "host": "", **given})
    with pytest.raises(InvalidArgument, match="nobody could reach the broker"):
        server_settings({"data": "x", "host": "", **given})


def test_in_memory_topics_are_in_memory(home: dict[str, str]) -> None:
    settings = configured(home, None, data=":memory:").settings
    assert settings.broker().topic.storage.value == "memory"
    assert settings.socket_path == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", ["'prot'", "did you mean port?"]),
        ("[topic]\npartition = 1", ["'partition'", "did you mean partitions?"]),
        ("zzzzzzzzzz = 1", ["zzzzzzzzzz", "connections_max"]),
        ("port = 'many'", ["port", "'many' is no whole number"]),
        ("port = 70000", ["port", "65535", "70000"]),
        ("port = [1]", ["port", "int"]),
        ("drain_seconds = -1", ["drain_seconds", "-1"]),
        ("data = ''", ["data"]),
        ("auto_create_topics = 'maybe'", ["auto_create_topics", "maybe"]),
        ("log_level = 'loud'", ["log_level", "debug", "loud"]),
        ("topic = 3", ["topic"]),
        ("[topic]\npartitions = 0", ["partitions", "0"]),
        ("[topic]\ndurability = 'sometimes'", ["durability", "sometimes"]),
        ("maintenance_seconds = 0.0", ["maintenance_seconds"]),
        ("port = \n", ["not TOML", "line 1"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(
    text: str, words: list[str], home: dict[str, str], tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    said = wrong(home, path)
    for word in [*words, path]:
        assert word in said


def test_what_is_wrong_elsewhere_is_named_with_its_place(home: dict[str, str]) -> None:
    assert "flag --port" in wrong(home, None, port="x")
    assert "environment HEADRACE_PORT" in wrong({**home, "HEADRACE_PORT": "99999"})
    assert "did you mean HEADRACE_PORT?" in wrong({**home, "HEADRACE_PORTS": "1"})
    assert "did you mean partitions?" in wrong(home, None, "partitons=1")
    configured({**home, "HEADRACE_URL": "headrace://elsewhere", "HEADRACE_SOMETHING_QUITE_DIFFERENT": "1"})


@pytest.mark.parametrize("name", ["URL", "TOKEN", "TOKEN_FILE", "TENANT", "CONTEXT", "CA", "CERTIFICATE", "KEY"])
def test_the_variables_of_clients_are_not_for_the_server(name: str, home: dict[str, str]) -> None:
    assert configured({**home, f"HEADRACE_{name}": "x"}).contents() == configured(home).contents()


def test_printed_configuration_gives_the_same_settings(home: dict[str, str], tmp_path: Path) -> None:
    given: dict[str, Any] = {"host": 'a "strange"\x7f\n name é', "drain_seconds": "1.5", "auto_create_topics": "no"}
    first = configured(home, None, "retain_seconds=7d", "durability=written", **given)
    text = first.as_toml()
    again = configured({}, written(tmp_path, text))
    assert again.settings.broker() == first.settings.broker()
    assert again.contents() == first.contents()
    assert "# flag --host" in text
    assert "# retain_bytes is not set" in text
    plain = tomllib.loads(text)
    assert plain.keys() == FIELDS.keys()
    assert first.as_dict()["settings"] == {**plain, "topic": {**dict.fromkeys(TOPIC_FIELDS), **plain["topic"]}}
    assert first.as_dict()["sources"]["topic.retain_seconds"] == "flag --topic retain_seconds=7d"


def test_every_setting_is_explained_and_every_one_of_the_brokers_is_there() -> None:
    assert field_explanations(ServerSettings).keys() == FIELDS.keys()
    ours = {field.name: field.default for field in msgspec.structs.fields(ServerSettings)}
    for field in msgspec.structs.fields(BrokerSettings):
        if field.name != "topic":
            assert ours[field.name] == field.default


# Addresses.


def test_addresses_come_from_flags_the_environment_or_a_file(home: dict[str, str], tmp_path: Path) -> None:
    urls = ["headrace://0.0.0.0:7391", "unix:///run/a.sock"]
    as_file = written(tmp_path, f"listen = {urls!r}")
    in_environment = {**home, "HEADRACE_LISTEN": ", ".join(urls)}
    for found in (
        configure({"listen": urls}, {}, None, home),
        configured(in_environment),
        configured(home, as_file),
    ):
        assert found.settings.listen == urls
        assert [str(address) for address in listen_addresses(found.settings)] == urls, "and nowhere else"
        assert tomllib.loads(found.as_toml())["listen"] == urls
    again = configured(home, written(tmp_path, configured(in_environment).as_toml()))
    assert [str(address) for address in listen_addresses(again.settings)] == urls


def test_host_port_and_unix_socket_add_to_the_addresses(home: dict[str, str]) -> None:
    environ = {**home, "HEADRACE_LISTEN": "headrace://[::1]:1"}
    found = configured(environ, None, port="2", unix_socket="/run/b.sock")
    addresses = [str(address) for address in listen_addresses(found.settings)]
    assert addresses == ["headrace://127.0.0.1:2", "headrace://[::1]:1", "unix:///run/b.sock"]
    default = [str(address) for address in listen_addresses(configured(home).settings)]
    http = [] if missing_packages() else [f"http://{DEFAULT_HTTP_ADDRESS}"]
    assert default == ["headrace://127.0.0.1:7390", f"unix://{configured(home).settings.socket_path}", *http]
    embedded = server_settings({"data": ":memory:", "listen": ["headrace://h"]})
    assert [(each.host, each.port) for each in listen_addresses(embedded)] == [("h", 7390)]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("127.0.0.1:7390", "is no URL"),
        ("headrace://", "host and a port"),
        ("headrace://h:70000", "is no URL"),
        ("headrace://h/topic", "host and a port"),
        ("headrace://user@h:1", "user"),
        ("headrace://h:1?x=1", "query"),
        ("unix://a.sock", "whole path"),
        ("unix:///", "whole path"),
        ("unix:///a%00b", "null"),
        ("bad_scheme://h", "is no URL"),
        ("headrace://[::1", "is no URL"),
    ],
)
def test_a_wrong_address_is_refused_with_the_right_way_to_write_one(home: dict[str, str], url: str, text: str) -> None:
    told = wrong({**home, "HEADRACE_LISTEN": url})
    assert text in told
    assert url.replace("user@", "...@") in told
    assert "headrace://127.0.0.1:7390" in told
    assert "HEADRACE_LISTEN" in told


@pytest.mark.parametrize("text", ["", ",", " , "])
def test_a_variable_without_an_address_is_as_if_not_set(text: str, home: dict[str, str], tmp_path: Path) -> None:
    found, plain = configured({**home, "HEADRACE_LISTEN": text}), configured(home)
    assert listen_addresses(found.settings) == listen_addresses(plain.settings)
    assert found.source("listen") == "default"
    as_file = written(tmp_path, "listen = ['headrace://h:1']")
    assert configured({**home, "HEADRACE_LISTEN": text}, as_file).settings.listen == ["headrace://h:1"]


def test_an_address_is_given_once(home: dict[str, str]) -> None:
    assert "twice" in wrong({**home, "HEADRACE_LISTEN": "headrace://h:1 headrace://h:1"})
    assert configured({**home, "HEADRACE_LISTEN": "headrace://h:0 headrace://h:0"}).settings


def test_the_path_of_a_socket_may_have_any_characters(home: dict[str, str]) -> None:
    (address,) = listen_addresses(configured({**home, "HEADRACE_LISTEN": "unix:///run/a%2C%20b.sock"}).settings)
    assert address.path == "/run/a, b.sock"
    (address,) = listen_addresses(configured(home, None, host="", unix_socket="/run/ä b.sock").settings)
    assert parse_listen_address(str(address)).path == address.path
