"""A registered instance of a service."""

import msgspec

from headrace.broker.ports import Session
from headrace.model.service_requests import ServiceDefinition, ServiceInstance


class LiveInstance:
    """A registered instance of a service, and the sessions that keep it alive."""

    __slots__ = (
        "client",
        "definition",
        "identity",
        "key",
        "registered_us",
        "seen_us",
        "sessions",
        "size_bytes",
        "ttl_us",
    )

    def __init__(self, definition: ServiceDefinition, session: Session, ttl_us: int, now_us: int) -> None:
        self.key = definition.name, definition.instance
        self.definition = definition
        self.size_bytes = definition_bytes(definition)
        self.client = session.client
        self.identity = session.identity
        self.sessions = {session}
        self.ttl_us = ttl_us
        self.registered_us = now_us
        self.seen_us = now_us

    def info(self, *, metadata: bool = True) -> ServiceInstance:
        """The instance as others see it, with or without its metadata."""
        return ServiceInstance(
            instance=self.definition.instance,
            version=self.definition.version,
            client=self.client,
            address=next((session.address for session in self.sessions), ""),
            metadata=self.definition.metadata if metadata else {},
            registered_us=self.registered_us,
            seen_us=self.seen_us,
            ttl_ms=self.ttl_us // 1000,
            connected=bool(self.sessions),
        )


def definition_bytes(definition: ServiceDefinition) -> int:
    """How much an instance says of itself."""
    return len(msgspec.msgpack.encode(definition))
