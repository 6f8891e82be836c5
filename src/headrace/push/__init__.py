"""What the broker sends to others by itself, over HTTP."""
