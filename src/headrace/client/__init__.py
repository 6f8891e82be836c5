"""The client: one connection to a broker, producers, subscriptions and transactions; the same for threads and asyncio.

What is in `_async` is written by hand, what is in `_sync` is made from it by `scripts/unasync.py`, but for the two
modules that touch the world: `concurrency` and `link` are written for each. Everything that does no I/O is shared by
both and lives here.
"""
