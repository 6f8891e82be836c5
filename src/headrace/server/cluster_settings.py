"""The checks of a server's settings about its cluster."""

import re
from typing import Any
from urllib.parse import urlsplit

from headrace.model.errors import InvalidArgument

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
PEER_SETTINGS = ("node_token_file", "node_ca", "node_certificate", "node_key")
"""How a node connects to the others."""
_NEED_CLUSTER = ("store", "node", "zone", "advertise", *PEER_SETTINGS, "store_credentials_file")
_ADVERTISED = ("headrace", "headraces", "http", "https")
_RANGES = {
    "cluster_heartbeat_seconds": (0.1, 60),
    "backup_seconds": (0, 1e8),
    "checkpoint_bytes": (1 << 20, 1 << 40),
    "checkpoint_seconds": (1, 86_400),
}


def check_cluster(settings: Any) -> None:
    """Refuse ServerSettings about a cluster that contradict each other, or that no cluster can have."""
    for name, (low, high) in _RANGES.items():
        if not low <= getattr(settings, name) <= high:
            raise InvalidArgument(f"{name} must be {low} to {high}, not {getattr(settings, name)}")
    if not settings.cluster:
        needing = [name for name in _NEED_CLUSTER if getattr(settings, name)]
        if needing:
            raise InvalidArgument(f"{needing[0]} needs cluster: the name of the cluster that the broker is a node of")
        return
    if not settings.store:
        raise InvalidArgument("cluster needs store: the URL of the store that all its nodes share")
    for what in ("cluster", "node"):
        if getattr(settings, what):
            check_name(getattr(settings, what), what)
    if settings.in_memory:
        raise InvalidArgument("cluster needs a directory as data, not :memory:, which is a cache of the shared store")
    _check_store(settings.store)
    if settings.node_key and not settings.node_certificate:
        raise InvalidArgument("node_key is the key of node_certificate: give that, too")
    for url in settings.advertise:
        _check_advertised(url)


def check_name(name: str, what: str = "cluster") -> None:
    """Refuse a name that no cluster or node can have."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{what} must be up to 100 letters, digits, `.`, `_` and `-`, not beginning with a sign: not {name!r}"
        )


def _check_store(url: str) -> None:
    scheme, separator, rest = url.partition(":")
    if not separator or not scheme or not rest:
        raise InvalidArgument("store must be a URL such as postgresql://USER@HOST/DATABASE or s3://BUCKET/PREFIX")
    if urlsplit(url).password is not None:
        raise InvalidArgument(
            "store is shown in lists of settings and processes: a URL with a password is not accepted; give it in the "
            "environment, such as PGPASSWORD, or with store_credentials_file"
        )


def _check_advertised(url: str) -> None:
    parts = urlsplit(url)
    try:
        has_port = parts.port is not None
    except ValueError as error:
        raise InvalidArgument(f"advertise must be URLs with a port, not {url!r}: {error}") from error
    if parts.scheme not in _ADVERTISED or not parts.hostname or not has_port or "@" in parts.netloc:
        raise InvalidArgument(f"advertise must be URLs such as headrace://10.0.0.7:7390, not {url!r}")
