"""A node of another version of Headrace: one that knows another format of the cluster's objects.

Run as: python -m tests.faults.versioned_node FORMAT serve ... The constant is changed before anything else is imported,
as another version would have it.
"""

import os
import sys

from tests.faults.network_namespaces import enter


def serve_version_1(namespace: str, environment: dict[str, str], arguments: list[str]) -> None:
    """In the node's process: be a node that knows format 1."""
    _become("1", namespace, environment, arguments)


def serve_version_2(namespace: str, environment: dict[str, str], arguments: list[str]) -> None:
    """In the node's process: be a node that knows formats 1 and 2."""
    _become("2", namespace, environment, arguments)


def _become(version: str, namespace: str, environment: dict[str, str], arguments: list[str]) -> None:
    if namespace:
        enter(namespace)
    path = os.pathsep.join(filter(None, sys.path))
    words = [sys.executable, "-m", "tests.faults.versioned_node", version, *arguments]
    os.execve(sys.executable, words, {**os.environ, **environment, "PYTHONPATH": path})


def main(version: int, arguments: list[str]) -> int:
    """Change the format, and run the command line."""
    from headrace.storage.replicated import manifest

    loaded = [name for name in sys.modules if name.startswith(("headrace.cluster", "headrace.server"))]
    assert not loaded, f"{loaded} have the former constant"
    manifest.FORMAT = version
    from headrace.cli.main import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
