"""Apps: handlers, their registration and their workers."""
