"""WebSockets: requests to the broker, and what it tells a client unasked, as frames of JSON or MessagePack."""
