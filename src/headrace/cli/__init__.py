"""The command line: `headrace` and its commands."""
