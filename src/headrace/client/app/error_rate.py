"""Bounds how many errors an app reports; decides without I/O."""

_PER_SECOND = 10.0
_BURST = 100.0


class ErrorRate:
    """Admits a burst of errors, and then so many a second; counts the others."""

    __slots__ = ("_room", "_seen_s", "suppressed")

    def __init__(self, now_s: float) -> None:
        self._room = _BURST
        self._seen_s = now_s
        self.suppressed = 0
        """Errors that were not reported since the last one that was."""

    def admits(self, now_s: float) -> bool:
        """Whether to report an error that happens now.

        >>> rate = ErrorRate(0.0)
        >>> sum(rate.admits(0.0) for _ in range(150)), rate.suppressed, rate.admits(1.0)
        (100, 50, True)
        """
        self._room = min(_BURST, self._room + (now_s - self._seen_s) * _PER_SECOND)
        self._seen_s = now_s
        if self._room < 1:
            self.suppressed += 1
            return False
        self._room -= 1
        return True
