"""What runs the broker: its clock and the scheduler on the event loop."""
