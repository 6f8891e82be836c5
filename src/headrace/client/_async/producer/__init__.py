"""Publishing, the side that does I/O; `headrace.client.producer` tells the way of a batch."""
