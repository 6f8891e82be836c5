"""Makes column names unique."""

from collections.abc import Sequence


def unique_names(names: Sequence[str]) -> list[str]:
    """Return the names, with a number appended to repeated ones.

    >>> unique_names(["key", "key", "n", "key", "key_2"])
    ['key', 'key_3', 'n', 'key_4', 'key_2']
    """
    taken, found = set(names), list[str]()
    for name in names:
        number, chosen = 2, name
        while chosen in found or (chosen != name and chosen in taken):
            chosen, number = f"{name}_{number}", number + 1
        found.append(chosen)
    return found
