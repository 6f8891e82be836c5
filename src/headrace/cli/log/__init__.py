"""The parts of `headrace log`."""
