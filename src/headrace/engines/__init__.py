"""What a partition and a subscription mean, on top of the log."""
