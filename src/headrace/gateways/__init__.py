"""Gateways: sockets on one side, the broker on the other."""
