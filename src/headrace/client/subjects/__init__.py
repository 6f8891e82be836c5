"""Subjects: what is received and replied, for threads and for asyncio alike."""
