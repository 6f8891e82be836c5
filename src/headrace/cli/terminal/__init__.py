"""Output to a terminal: colours, progress, watching, log lines, signals."""
