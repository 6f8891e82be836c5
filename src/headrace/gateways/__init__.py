"""Gateways connect clients of a protocol to the broker."""
