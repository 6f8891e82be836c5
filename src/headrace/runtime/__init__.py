"""What a server runs on: event loop, timers, the broker's clock and the scheduler."""
