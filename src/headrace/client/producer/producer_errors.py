"""Errors that only a client can have."""

from headrace.model.errors import HeadraceError


class Undelivered(HeadraceError):
    """Messages were given up, and nobody was told: they may or may not have reached the broker."""

    code = "undelivered"

    def __init__(self, count: int, first_error: HeadraceError | None) -> None:
        why = f"; the first failed because: {first_error}" if first_error is not None else ""
        super().__init__(f"{count} messages could not be delivered{why}", count=count)
        self.count = count
        """How many messages."""
        self.first_error = first_error
