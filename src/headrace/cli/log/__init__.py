"""The implementation of `headrace log`."""
