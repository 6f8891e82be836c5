"""Means for tests, those of Headrace's users too: a disk that loses power, fills up, fails and flips bits."""

from headrace.testing.faulty_disk import FaultyDisk, Flip, PowerLoss
from headrace.testing.survival import Unsynced

__all__ = ["FaultyDisk", "Flip", "PowerLoss", "Unsynced"]
