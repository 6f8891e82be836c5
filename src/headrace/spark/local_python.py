"""Which Python Spark runs on this machine: the one that runs this, in which Headrace is, whatever is on the PATH."""

import os
import sys
from pathlib import Path

LAUNCHER = str(Path(__file__).with_name("python.sh"))
"""What Spark takes for Python."""


def choose_python() -> None:
    """Have a session that begins now use this Python, unless the user has said which."""
    if "PYSPARK_PYTHON" in os.environ:
        return
    # With a Spark of the user's own its archive of pyspark counts, not what is installed here.
    if "SPARK_HOME" in os.environ or not os.access(LAUNCHER, os.X_OK):
        os.environ["PYSPARK_PYTHON"] = sys.executable
        return
    os.environ |= {"PYSPARK_PYTHON": LAUNCHER, "HEADRACE_SPARK_PYTHON": sys.executable}
