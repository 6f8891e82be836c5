"""The gateway of HTTP: resources, event streams and metrics, on the broker's own event loop."""
