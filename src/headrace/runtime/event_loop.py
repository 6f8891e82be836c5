"""Creates the event loop of a broker."""

import asyncio
import resource
from collections.abc import Callable
from contextlib import suppress

from headrace.model.errors import TooManyFiles

FILES_MIN = 32
"""The fewest open files with which an event loop, the journal, a topic and a client work."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create the fastest event loop that is installed."""
    make: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with suppress(ImportError):
        import uvloop

        make = uvloop.new_event_loop
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < FILES_MIN:
        raise TooManyFiles(
            f"the process may open {limit} files, and a broker needs {FILES_MIN} at least; raise the limit (ulimit -n)"
        )
    try:
        return make()
    except OSError as error:  # it needs a few files, and nothing else that could be refused
        raise TooManyFiles(f"no event loop: {error.strerror}; raise the limit on open files (ulimit -n)") from error
