"""The number of connections that all gateways of a server share."""

from headrace.model.errors import LimitExceeded


class ConnectionLimit:
    """Counts the connections of all gateways, and refuses those above the limit."""

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self.connections = 0

    def admit(self) -> LimitExceeded | None:
        """Count a new connection; the error to refuse it with if there are too many. Each admitted one is released."""
        if self.connections < self.connections_max:
            self.connections += 1
            return None
        return LimitExceeded(
            f"the broker has {self.connections} connections already, as many as connections_max and its limit on open "
            "files allow; close some, or raise both",
            connections_max=self.connections_max,
        )

    def release(self) -> None:
        """Count an admitted connection no longer."""
        self.connections -= 1
