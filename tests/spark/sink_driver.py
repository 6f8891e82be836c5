"""A program with a stream that writes numbers to a topic, each once, for as long as it lives; to be killed.

Run as: sink_driver.py ADDRESS CHECKPOINT PERMISSION. It begins when the file PERMISSION is there.
"""

import sys
import time
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.spark.conftest import spark_settings

TOPIC = "out"
ROWS = 1000
"""Of one batch."""


def main(address: str, checkpoint: str, permission: str) -> None:
    """Write for ever; a query that fails is started again, as whoever looks after one does."""
    builder = SparkSession.builder
    for name, value in {**spark_settings(), "spark.master": "local[2,8]"}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    while not Path(permission).exists():
        time.sleep(0.01)
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", 2)
    rows = source.load().selectExpr("cast(value as string) as value", "cast(value % 5 as string) as key")
    while True:
        writer = rows.writeStream.format("headrace").option("address", address).option("topic", TOPIC)
        query = writer.option("checkpointLocation", checkpoint).start()
        try:
            query.awaitTermination()
        except PySparkException as error:
            sys.stderr.write(f"the query is started again: {error}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
