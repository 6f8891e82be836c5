"""Shared stores: existing engines with conditional writes, on which the nodes of a cluster agree."""
