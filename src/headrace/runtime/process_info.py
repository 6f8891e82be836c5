"""Facts about the process in which a broker runs."""

import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

from headrace.model.limits import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX, PARTITIONS_MAX


def process_info(listening: Sequence[str], **limits: int) -> dict[str, Any]:
    """The fields of BrokerInfo that the broker itself cannot know; `listening` has the URLs of its addresses."""
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    known = {
        "message_bytes_max": MESSAGE_BYTES_MAX,
        "batch_bytes_max": BATCH_BYTES_MAX,
        "partitions_max": PARTITIONS_MAX,
        "open_files_max": sys.maxsize if files_max == resource.RLIM_INFINITY else files_max,
    }
    return {
        "listening": list(listening),
        "pid": os.getpid(),
        "memory_bytes": memory_bytes(),
        "limits": {**limits, **known},
    }


def memory_bytes() -> int:
    """The memory that the process uses; where the system does not tell, the most that it has used."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
