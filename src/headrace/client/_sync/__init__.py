"""The client for threads, made from the one for asyncio by scripts/unasync.py."""
