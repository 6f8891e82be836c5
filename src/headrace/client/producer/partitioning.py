"""Which partition a message goes to."""

from collections.abc import Callable, Sequence

Partitioner = Callable[[bytes, int], int]
"""Takes a key and the number of partitions, and returns a partition's number. Messages without a key do not ask it."""


def partition_places(
    keys: Sequence[bytes | None], partitions: int, partitioner: Partitioner, keyless: int
) -> dict[int, list[int]]:
    """The places of the keys by partition; those that are None go to the partition `keyless`."""
    places: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        partition = keyless if key is None else partitioner(key, partitions)
        if partition in places:
            places[partition].append(place)
        else:
            places[partition] = [place]
    return places
