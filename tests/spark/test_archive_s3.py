"""An archive in a store of objects, reached by HTTP as S3 is: written, read, expired and deleted with no jar."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs
from tests.spark.conftest import SparkBroker, java_problem
from tests.spark.test_archive import archive, chunks_of, fill, firsts, rows

from headrace.spark.archive import parquet, paths
from headrace.spark.archive.expirer import Expirer
from headrace.spark.source.message_source import BrokerSource

server = pytest.importorskip("moto.server", reason="the S3 server is not installed: bin/setup test")

SOON_S = 200.0
BUCKET = "company"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where an S3 server with an empty bucket listens."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    address = f"{host}:{port}"
    there = fs.S3FileSystem(endpoint_override=address, scheme="http", region="us-east-1", allow_bucket_creation=True)
    there.create_dir(BUCKET)
    paths.resolve_url.cache_clear()
    yield address
    paths.resolve_url.cache_clear()
    running.stop()


def objects(endpoint: str) -> list[str]:
    """The names of all objects with contents in the bucket."""
    there = fs.S3FileSystem(endpoint_override=endpoint, scheme="http", region="us-east-1")
    found = there.get_file_info(fs.FileSelector(BUCKET, recursive=True))
    return [one.path.removeprefix(f"{BUCKET}/") for one in found if one.type is fs.FileType.File and one.size]


def test_files_are_written_read_and_removed(endpoint: str) -> None:
    url = paths.archive_url(f"s3a://{BUCKET}/an/archive?endpoint_override={endpoint}&scheme=http")
    base = paths.resolve_url(url)
    names = parquet.SCHEMA.names
    rows = [dict.fromkeys(names) | {"partition": 0, "offset": at, "timestamp": at, "value": b"x"} for at in range(5)]
    path = "topic=a/run=1/date=2026-01-01/part-1.zstd.parquet"
    batch = pa.RecordBatch.from_pylist(rows, parquet.SCHEMA)
    assert parquet.write_file(base.below(path), [batch, batch])[0] == 10
    paths.write_whole(base.below("topic=a/_manifest/1.json"), b"{}")
    assert paths.names_below(base) == ["topic=a"]
    assert sorted(objects(endpoint)) == sorted([f"an/archive/{path}", "an/archive/topic=a/_manifest/1.json"])
    assert list(paths.files_below(base.below(path).parent)) == [(path.split("/")[-1], paths.size_of(base.below(path)))]
    assert parquet.open_file(base.below(path)).metadata.num_rows == 10
    paths.remove_directory(base.below("topic=a"))
    assert objects(endpoint) == []


def test_nothing_secret_is_kept_in_the_manifest() -> None:
    with pytest.raises(paths.InvalidArgument, match="AWS_ACCESS_KEY_ID"):
        paths.archive_url("s3://key:secret@company/archive")


def told(*arguments: str, quickly: dict[str, str], **environment: str) -> list[dict[str, Any]]:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *arguments, "--json"],
        env={**os.environ, **quickly, **environment},
        capture_output=True,
        timeout=SOON_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


READ = """
import sys
import headrace.spark
spark = headrace.spark.session(sys.argv[1], tables=False, master="local[2]")
frame = spark.read.format("headrace").option("address", sys.argv[1]).option("subscribe", sys.argv[2]).load()
print(frame.count(), frame.where("offset >= 90").count())
"""


def test_archived_read_expired_and_deleted(spark: Any, broker: SparkBroker, topic: str, endpoint: str) -> None:
    broker.bus.create_topic(topic, partitions=2)
    fill(broker, topic, 90)
    fill(broker, topic, 30, partition=1)
    before = rows(spark, broker, topic)
    url = f"s3a://{BUCKET}/archive?endpoint_override={endpoint}&scheme=http"
    assert archive(spark, broker, topic, url).dropped == 80
    assert rows(spark, broker, topic) == before
    (chunk,) = chunks_of(broker, topic)
    assert {f"archive/{file.path}" for file in chunk.files} < set(objects(endpoint))
    origin = BrokerSource(broker.address, SOON_S)
    expirer = Expirer(origin, topic)
    expirer.expire(expirer.plan(None, max(file.bytes for file in chunk.files)))
    left = rows(spark, broker, topic)
    assert 40 <= len(left) < 120
    assert set(map(repr, left)) < set(map(repr, before))
    Expirer(origin, topic).delete()
    origin.close()
    assert objects(endpoint) == []
    assert len(rows(spark, broker, topic)) == 40


@pytest.mark.long
@pytest.mark.parametrize("by", ["url", "environment"])
def test_as_a_person_uses_it(
    own_broker: SparkBroker, topic: str, endpoint: str, quickly: dict[str, str], tmp_path: Path, by: str
) -> None:
    if problem := java_problem():
        pytest.skip(problem)
    fill(own_broker, topic, 150)
    settings = f"?endpoint_override={endpoint}&scheme=http" if by == "url" else ""
    environment = {"AWS_ENDPOINT_URL": f"http://{endpoint}"} if by == "environment" else {}
    where = ("--connect", own_broker.address, "--master", "local[2]")
    to = f"s3a://{BUCKET}/archive{settings}"
    (outcome,) = told("archive", "run", topic, "--to", to, "--older-than", "1d", *where, quickly=quickly, **environment)
    assert (outcome["messages"], outcome["dropped"]) == (100, 100)
    assert firsts(own_broker, topic) == [100]
    (chunk,) = chunks_of(own_broker, topic)
    assert {f"archive/{file.path}" for file in chunk.files} < set(objects(endpoint))
    query = f"select count(*) as n, min(offset) as first from `{topic}`"
    assert told("sql", query, *where, quickly=quickly, **environment) == [{"n": 150, "first": 0}]
    if by == "url":
        return
    read = subprocess.run(
        [sys.executable, "-c", READ, own_broker.address, topic],
        env={**os.environ, **quickly, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )
    assert read.stdout.split() == ["150", "60"], read.stderr
