"""What the ready pipelines share: telling messages that can be used from those that cannot, and rows into topics."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f


def json_topic(topic: str, schema: str) -> dict[str, str]:
    """The source for a topic of JSON values.

    The first start begins with the oldest message, not with new ones, and does not take all of a large topic at once.
    """
    return {
        "subscribe": topic,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": "500000",
        "value.format": "json",
        "value.schema": schema,
    }


def usable(messages: DataFrame, needed: str, *others: str) -> DataFrame:
    """The values that could be read and have all the fields that are needed, as columns; beside other columns."""
    return messages.where(_is_usable(needed)).select("value.*", *others)


def unusable(messages: DataFrame, needed: str, topic: str) -> DataFrame:
    """Everything else, for a topic where somebody can look at it; a header says where the message itself is."""
    place = f.concat_ws("/", "topic", "partition", "offset")
    return messages.where(~_is_usable(needed)).select(
        f.lit(topic).alias("topic"),
        "key",
        f.coalesce("_corrupt", f.to_json("value")).alias("value"),
        f.create_map(f.lit("from"), place).alias("headers"),
    )


def once(rows: DataFrame, column: str, late_max: str) -> DataFrame:
    """Rows that are sent twice count once; for as long as a stream remembers them, which is `late_max`."""
    known = rows.withWatermark("ts", late_max)
    # A batch job has all of them before it, and Spark wants to be told so.
    return known.dropDuplicatesWithinWatermark([column]) if rows.isStreaming else known.dropDuplicates([column])


def to_topic(rows: DataFrame, topic: str, key: str) -> DataFrame:
    """Rows as messages: JSON of all columns, with the key that one of them gives."""
    return rows.select(
        f.lit(topic).alias("topic"),
        f.col(key).cast("string").cast("binary").alias("key"),
        f.to_json(f.struct("*")).alias("value"),
        f.lit(None).cast("map<string,string>").alias("headers"),
    )


def together(*parts: DataFrame) -> DataFrame:
    """Messages for several topics in one query: what a trigger makes appears in all of them at once, or in none."""
    first, *others = parts
    for part in others:
        first = first.unionByName(part)
    return first


def _is_usable(needed: str) -> Column:
    fields = [f.col(f"value.{name.strip()}").isNotNull() for name in needed.split(",")]
    whole = f.col("_corrupt").isNull()
    for field in fields:
        whole = whole & field
    return whole
