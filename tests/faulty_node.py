"""A node whose disk fails while a file exists, that reads slowly, or knows another format. Only tests start it.

`python -m tests.faulty_node serve ...` is `headrace serve ...`. TEST_FAULT_FILE names the file, which has the
name of the error, such as EIO: writes below the shard's directory fail with it. TEST_WAL_DELAY is how
many seconds it takes to read a WAL object from a directory. TEST_FORMAT is the highest format that it knows.
"""

import errno
import os
import sys
import time
from typing import Any

from headrace.storage import disk as disks


def fail_writes(path: str) -> None:
    """Let writes to the shard's files fail while there is a file at this path."""
    write: Any = disks.LocalDisk.write

    def failing(disk: disks.LocalDisk, file: disks.OpenFile, position: int, data: bytes) -> None:
        if "/shards/" in file.path and os.path.exists(path):
            with open(path, encoding="utf-8") as order:
                number = getattr(errno, order.read().strip())
            error = OSError(number, os.strerror(number))
            raise disks._explained(error, file.path) from error
        write(disk, file, position, data)

    setattr(disks.LocalDisk, "write", failing)  # noqa: B010


def read_slowly(delay_s: float) -> None:
    """Take so long to read each WAL object."""
    from headrace.storage.stores.directory import DirectoryStore

    get: Any = DirectoryStore.get

    def slow(store: DirectoryStore, key: str) -> Any:
        if "/wal/" in key:
            time.sleep(delay_s)
        return get(store, key)

    setattr(DirectoryStore, "get", slow)  # noqa: B010


def know_format(number: int) -> None:
    """Be of a version that knows another format."""
    import headrace.cluster.node_settings as node_settings
    import headrace.server.cluster_port as cluster_port
    import headrace.storage.replicated.epochs as epochs
    import headrace.storage.replicated.manifest as manifest

    for module in (manifest, epochs, cluster_port, node_settings):
        setattr(module, "FORMAT", number)  # noqa: B010
    defaults = {**node_settings.NodeSettings._field_defaults, "format_max": number}
    node_settings.NodeSettings.__new__.__defaults__ = tuple(defaults.values())


if __name__ == "__main__":
    if "TEST_FAULT_FILE" in os.environ:
        fail_writes(os.environ["TEST_FAULT_FILE"])
    if "TEST_WAL_DELAY" in os.environ:
        read_slowly(float(os.environ["TEST_WAL_DELAY"]))
    if "TEST_FORMAT" in os.environ:
        know_format(int(os.environ["TEST_FORMAT"]))
    from headrace.cli.main import main

    sys.exit(main(sys.argv[1:]))
