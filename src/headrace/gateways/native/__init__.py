"""The gateway of the native protocol."""
