"""What a user may have meant who wrote something that there is not."""

from collections.abc import Iterable

_NEAR = 0.6
_OFFERED_MAX = 3


def nearest(text: str, known: Iterable[str]) -> list[str]:
    """The known words that are most like a text, the best first.

    >>> nearest("tpoic", ["publish", "tail", "topic"])
    ['topic']
    """
    import difflib  # only for who made a slip: every command would wait for it

    by_lower = {word.lower(): word for word in known}
    return [by_lower[word] for word in difflib.get_close_matches(text.lower(), by_lower, _OFFERED_MAX, _NEAR)]


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """A question that names the nearest words; empty if there are none.

    >>> did_you_mean("order", ["orders", "older", "clicks"])
    'did you mean orders or older?'
    """
    found = nearest(text, known)
    if not found:
        return ""
    *others, last = found
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
