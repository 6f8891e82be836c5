"""Spark's own connector for Kafka: its jars, got by Maven for the version of Spark that is here, or given."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.bench.measure import Unavailable

ARTIFACT = "spark-sql-kafka-0-10_2.13"
GIVEN = "HEADRACE_BENCH_KAFKA_JARS"
"""Names a directory with the connector's jars, where Maven does not have those for this version."""
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>benchmark</groupId><artifactId>connector</artifactId><version>1</version>
<dependencies>
<dependency><groupId>org.apache.spark</groupId><artifactId>{artifact}</artifactId><version>{version}</version></dependency>
</dependencies></project>
"""


def jars() -> Sequence[Path]:
    """The connector's jars; raises Unavailable if they cannot be had."""
    given = os.environ.get(GIVEN)
    place = Path(given) if given else _kept()
    found = sorted(place.glob("*.jar"))
    if not any(jar.name.startswith(ARTIFACT) for jar in found):
        how = "" if given else f": Maven is missing or could not get it, see above; {GIVEN} may name a copy"
        raise Unavailable(f"there is no {ARTIFACT} in {place}{how}")
    return found


@functools.cache
def _kept() -> Path:
    """Where the jars for this Spark are kept, which Maven gets the first time."""
    from pyspark import __version__

    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace-benchmarks"
    kept = caches / f"spark-kafka-{__version__}"
    if not kept.is_dir() and shutil.which("mvn"):
        _get(__version__, kept)
    return kept


def _get(version: str, kept: Path) -> None:
    print(f"benchmarks: getting {ARTIFACT} {version}", file=sys.stderr, flush=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as place:
        (Path(place) / "pom.xml").write_text(_POM.format(artifact=ARTIFACT, version=version), encoding="utf-8")
        command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"]
        command.append("-DoutputDirectory=jars")
        done = subprocess.run(command, cwd=place, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        if done.returncode == 0:
            (Path(place) / "jars").rename(kept)
