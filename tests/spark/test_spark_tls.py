"""Spark reads and writes topics over TLS, and its plans tell nothing of the client's key."""

from pathlib import Path

from pyspark.sql import SparkSession
from tests.certificates import make_ca, tls_broker, url_of

import headrace


def test_source_and_sink_take_a_ca_and_a_client_certificate(spark: SparkSession, topic: str, tmp_path: Path) -> None:
    ca = make_ca(tmp_path)
    files, job = ca.make_server(), ca.make_client("job")
    options = {"tls.ca": files.ca, "tls.certificate": job.certificate, "tls.key": job.key}
    with tls_broker(files, tls_client_ca=files.ca, tls_client_required=True) as server:
        options["address"] = url_of(server)
        frame = spark.createDataFrame([("3 apples",), ("1 pear",)], "value string").coalesce(1)
        frame.write.format("headrace").options(**options, topic=topic).mode("append").save()
        read = spark.read.format("headrace").options(**options, subscribe=topic).load()
        assert [bytes(row.value) for row in read.select("value").collect()] == [b"3 apples", b"1 pear"]
        address = f"{url_of(server)}?ca={files.ca}&certificate={job.certificate}&key={job.key}"
        again = spark.read.format("headrace").options(address=address, subscribe=topic).load()
        assert again.count() == 2
        plan = read._jdf.queryExecution().toString() + again._jdf.queryExecution().toString()
        with headrace.connect(url_of(server), ca=files.ca, certificate=job.certificate, key=job.key) as bus:
            assert bus.describe_topic(topic).partitions[0].next_offset == 2
    assert job.key not in plan
    assert Path(job.key).read_text().splitlines()[1] not in plan
