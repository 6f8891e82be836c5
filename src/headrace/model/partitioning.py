"""Which partition a key belongs to."""

from crc32c import crc32c


def by_key(key: bytes, partitions: int) -> int:
    """The partition of a key, the same everywhere: the crc32c of the key modulo the number of partitions.

    >>> by_key(b"customer-17", 8)
    3
    """
    return crc32c(key) % partitions
