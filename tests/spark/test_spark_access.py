"""Spark reaches what the roles of its token allow, and nothing else."""

from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.access_oracle import is_allowed
from tests.access_stage import ACTORS, Stage
from tests.http_client import native_url_of

from headrace.model.reading import Fetch
from headrace.model.request import Request
from headrace.model.requests import Publish, TopicDescribe

READS: list[Request[Any]] = [Fetch("orders", 0, 0), TopicDescribe("headrace.archive")]
"""The source looks for archived messages, too: a reader needs to see the catalogue of archives."""
PAIRS = [
    ("administrator", "reads"),
    ("consumer", "reads"),
    ("publisher", "reads"),
    ("publisher", "writes"),
    ("consumer", "writes"),
]
MORE = [(who, what) for who in ACTORS for what in ("reads", "writes") if (who, what) not in PAIRS]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    staged = Stage(tmp_path_factory.mktemp("access"))
    yield staged
    staged.close()


def failure(spark: SparkSession, stage: Stage, who: str, what: str) -> str:
    """What goes wrong when somebody reads or writes; empty if nothing does."""
    options = {"address": native_url_of(stage.server), "token": stage.tokens.get(who, ""), "timeout": "10"}
    options = {name: text for name, text in options.items() if text}
    try:
        if what == "reads":
            spark.read.format("headrace").options(**options, subscribe="orders").load().count()
        else:
            frame = spark.createDataFrame([("3 apples",)], "value string").coalesce(1)
            frame.write.format("headrace").options(**options, topic="orders").mode("append").save()
    except Exception as error:  # noqa: BLE001 Spark has several
        return str(error)
    return ""


@pytest.mark.parametrize(("who", "what"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.long) for pair in MORE)])
def test_spark_is_answered_as_the_roles_say(spark: SparkSession, stage: Stage, who: str, what: str) -> None:
    asks = READS if what == "reads" else [Publish("orders", 0)]
    told = failure(spark, stage, who, what)
    if all(is_allowed(ACTORS[who], request, "default") for request in asks):
        assert told == "", told[-600:]
    else:
        refused = ("NotAuthenticated",) if ACTORS[who].is_anonymous else ("Forbidden", "forbidden", "may not")
        assert any(one in told for one in (*refused, "belongs to the tenant", "has no role")), told
    assert not [token for token in stage.tokens.values() if token[16:] in told]
