"""Topics as tables of a session."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.spark.conftest import SparkBroker

import headrace.spark
from headrace.model.errors import InvalidArgument, TopicNotFound
from headrace.spark.sessions import java_version, need_java
from headrace.spark.sql.tables import register


@pytest.fixture(scope="module")
def sales(shared_broker: SparkBroker) -> SparkBroker:
    """A broker with topics to be queried."""
    bus = shared_broker.bus
    bus.create_topic("sales", partitions=2)
    values = [json.dumps({"id": at, "city": "Bern" if at % 2 else "Köln", "total": at * 1.5}) for at in range(20)]
    bus.publish_many("sales", [value.encode() for value in values], keys=[f"k{at % 3}" for at in range(20)])
    bus.create_topic("sales.eu-west")
    bus.publish_many("sales.eu-west", ["grün".encode(), b"\xff"], keys=["ä", b"\xfe"])
    bus.create_topic("headrace.audit")
    return shared_broker


def test_every_topic_is_a_table(spark: SparkSession, sales: SparkBroker) -> None:
    found = headrace.spark.session(sales.address, tables="sales*")
    assert found is spark
    assert headrace.spark.session is headrace.spark.session  # a function still, after its module was imported
    rows = spark.sql("select key, count(*) as n from sales where offset >= 0 group by key order by key").collect()
    assert [tuple(row) for row in rows] == [("k0", 7), ("k1", 7), ("k2", 6)]
    rows = spark.sql("select key, value from `sales.eu-west` order by offset").collect()
    assert [tuple(row) for row in rows] == [("ä", "grün"), ("�", "�")]


def test_topics_with_any_sign_in_their_names_are_tables(spark: SparkSession, sales: SparkBroker, topic: str) -> None:
    names = [f"_{topic} größe", f"{topic}`[a]'\"=b@c%2C", f"{topic[:9]}{'ß' * 240}"]
    for name in names:
        sales.bus.publish(name, b"v")
    assert register(spark, sales.address, tables=names) == sorted(names)
    assert register(spark, sales.address, tables=f"{topic}`[a]*") == [names[1]]
    for name in names:
        view = name.replace("`", "``")
        assert [tuple(row) for row in spark.sql(f"select topic, value from `{view}`").collect()] == [(name, "v")]
        sales.bus.delete_topic(name)


def test_tables_by_choice(spark: SparkSession, sales: SparkBroker) -> None:
    for name in ("sales", "sales.eu-west"):
        spark.catalog.dropTempView(name)
    chosen = {"sales*": {"columns": "value"}, "sales": {"value.format": "json", "columns": "key,value"}}
    assert register(spark, sales.address, tables=chosen) == ["sales", "sales.eu-west"]
    assert spark.table("`sales.eu-west`").columns == ["value"]
    assert spark.table("sales").columns == ["key", "value", "_corrupt"]
    query = "select value.city, sum(value.total) as total from sales group by 1 order by 1"
    assert [tuple(row) for row in spark.sql(query).collect()] == [("Bern", 150.0), ("Köln", 135.0)]


def test_json_where_it_is_json(spark: SparkSession, sales: SparkBroker) -> None:
    register(spark, sales.address, tables="sales*", value_format="auto")
    assert spark.table("sales").schema["value"].dataType.fieldNames() == ["id", "city", "total"]
    assert spark.table("`sales.eu-west`").schema["value"].dataType.simpleString() == "string"
    register(spark, sales.address, tables=["sales"], value_format="bytes")
    assert spark.table("sales").select("key", "value").dtypes == [("key", "binary"), ("value", "binary")]


def test_new_topics_and_fields_are_seen_anew(spark: SparkSession, sales: SparkBroker, topic: str) -> None:
    sales.bus.create_topic(topic)
    sales.bus.publish(topic, b'{"a": 1}')
    register(spark, sales.address, tables=[topic], value_format="json")
    sales.bus.publish(topic, b'{"b": 2}')
    register(spark, sales.address, tables=[topic], value_format="json")
    assert [row.value.asDict() for row in spark.table(f"`{topic}`").collect()] == [
        {"a": 1, "b": None},
        {"a": None, "b": 2},
    ]


def test_topics_of_files(spark: SparkSession, sales: SparkBroker) -> None:
    register(spark, path=str(sales.data), tables=["sales"])
    assert spark.sql("select count(*) from sales").collect()[0][0] == 20


def test_internal_topics_only_by_name(spark: SparkSession, sales: SparkBroker) -> None:
    assert "headrace.audit" not in register(spark, sales.address, tables="*audit")
    assert register(spark, sales.address, tables=["headrace.audit"]) == ["headrace.audit"]
    assert register(spark, sales.address, tables=False) == []


def test_what_cannot_be(spark: SparkSession, sales: SparkBroker, topic: str) -> None:
    sales.bus.create_topic(topic)
    with pytest.raises(TopicNotFound, match="no topic sails"):
        register(spark, sales.address, tables=["sails"])
    with pytest.raises(InvalidArgument, match=r"value\.schema"):
        register(spark, sales.address, tables={topic: {"value.format": "json"}})
    assert register(spark, sales.address, tables=[topic], value_format="json") == [topic]  # text until it has values
    with pytest.raises(InvalidArgument, match="not both"):
        register(spark, sales.address, path="/data")
    with pytest.raises(InvalidArgument, match=r"spark\.driver\.memory cannot be set"):
        headrace.spark.session(sales.address, tables=False, conf={"spark.driver.memory": "9g"})


def test_java_is_looked_for_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    java.chmod(0o755)
    assert java_version(str(java)) == 8
    (tmp_path / "release").write_text('IMPLEMENTOR="x"\nJAVA_VERSION="11.0.2"\n')
    assert java_version(str(java)) == 11
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(headrace.HeadraceError, match=r"needs Java 17 or later, and .* is Java 11"):
        need_java("local[2]")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    with pytest.raises(headrace.HeadraceError, match="JAVA_HOME"):
        need_java("local[2]")


def test_without_pyspark(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyspark'] = None\n"
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'pyspark' else find(name, *more)\n"
        "import headrace, headrace.spark\n"
        "try: headrace.spark.session()\n"
        "except headrace.HeadraceError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "pip install '/path/to/headrace[spark]'" in said.stdout
