"""One module for each command; `add_arguments(parser)` declares it."""
