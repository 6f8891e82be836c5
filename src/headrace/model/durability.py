"""How safe an append is: the receipt's scale."""

from enum import IntEnum


class Durability(IntEnum):
    """What has been reached for a message, from weakest to strongest."""

    MEMORY = 0
    """In this process: lost when it ends."""
    WRITTEN = 1
    """With the operating system: survives a killed process."""
    SYNCED = 2
    """On the disk: survives a power loss."""
    REPLICATED = 3
    """In the shared store of a cluster: survives the loss of the machine."""
