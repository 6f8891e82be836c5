"""The options `token` and `tokenFile` of the Spark source and sink: used to connect, and never shown."""

import pickle
from pathlib import Path

import msgspec
import pytest

import headrace
from headrace.model.errors import InvalidArgument, NotAuthenticated
from headrace.server import EmbeddedServer
from headrace.spark.archive.manifest import MANIFEST_TOPIC, Chunk
from headrace.spark.sink.options import sink_options
from headrace.spark.source.message_source import open_source
from headrace.spark.source.options import source_options


def test_a_token_is_used_on_executors_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_TOKEN", "HEADRACE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    server = EmbeddedServer(tmp_path / "data", host="127.0.0.1", port=0, unix_socket=f"{tmp_path}/s")
    try:
        with headrace.connect(f"headrace+unix://{tmp_path}/s") as admin:
            admin.publish("orders", b"1")
            archived = Chunk("old", 99, "b", 0, "r", "file:///nowhere", 1, {0: (0, 1)}, ())
            admin.publish(MANIFEST_TOPIC, msgspec.json.encode(archived), key=archived.key)
            admin.auth.bind("consumer", "spark")
            token = admin.auth.create_token("spark").token
            admin.auth.enable()
        address = next(url for url in server._server.listening if url.startswith("headrace://"))
        (tmp_path / "token").write_text(token)
        for given in ({"token": token}, {"tokenFile": str(tmp_path / "token")}):
            options = source_options({"address": address, "subscribe": "orders", "timeout": "5", **given})
            assert token not in repr(options)
            source = open_source(pickle.loads(pickle.dumps(options)))
            assert source.names() == ["orders"]
            assert source.topic("orders").spans[0].end == 1  # the list of archives can be read, too
            source.close()
        source = open_source(source_options({"address": address, "subscribe": "orders", "timeout": "5"}))
        with pytest.raises(NotAuthenticated):
            source.names()
    finally:
        server.close()


def test_the_sink_hides_the_token_and_takes_one_source_of_it() -> None:
    options = sink_options({"topic": "orders", "token": "hr_secret"})
    assert (options.token, "hr_secret" in repr(options)) == ("hr_secret", False)
    with pytest.raises(InvalidArgument, match="not both"):
        sink_options({"topic": "orders", "token": "hr_secret", "tokenFile": "x"})
