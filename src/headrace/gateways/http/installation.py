"""Whether the extra `http` is installed, and where HTTP listens by default; imports nothing of the extra."""

from importlib.util import find_spec

from headrace.wire.native import DEFAULT_HTTP_PORT

DEFAULT_HTTP_ADDRESS = f"127.0.0.1:{DEFAULT_HTTP_PORT}"
_PACKAGES = ("uvicorn", "httptools", "websockets")


def missing_packages() -> list[str]:
    """The packages of the extra that are not installed."""
    return [name for name in _PACKAGES if find_spec(name) is None]
