"""A fact: what a broker's journal is made of."""

import msgspec


class Fact(msgspec.Struct, array_like=True, tag=True):
    """Something decided."""
