"""The broker: what every gateway calls. No sockets, no files, no clock."""
