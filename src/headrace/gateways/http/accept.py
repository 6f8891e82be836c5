"""What a client accepts: the names in a header such as Accept or Accept-Encoding, by their quality values."""

import re

_QUALITY = re.compile(rb";\s*q\s*=\s*(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)\s*(?:;|$)", re.IGNORECASE)
_ENTRIES_MAX = 64


def qualities(header: bytes) -> dict[bytes, float]:
    """The quality of each name, in the order of the header: 1 if none is given, 0 for what is refused.

    >>> qualities(b"gzip;q=0.5, zstd, br;q=0")
    {b'gzip': 0.5, b'zstd': 1.0, b'br': 0.0}
    """
    found: dict[bytes, float] = {}
    for entry in header.split(b",", _ENTRIES_MAX)[:_ENTRIES_MAX]:
        name, parameters, _ = entry.partition(b";")
        name = name.strip().lower()
        if not name:
            continue
        given = _QUALITY.search(entry) if parameters else None
        found[name] = float(given[1]) if given else 1.0
    return found


def accepts(header: bytes, media_type: str) -> bool:
    """Whether a header Accept names this media type itself, with a quality above 0."""
    return qualities(header).get(media_type.encode(), 0.0) > 0
