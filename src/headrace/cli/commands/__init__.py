"""One module per command; its `add_arguments(parser)` defines the command's arguments."""
