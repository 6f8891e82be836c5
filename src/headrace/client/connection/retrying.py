"""Which errors a client repeats a request after; all within the time-out of the request."""

from headrace.model.errors import Busy, ConnectionFailed, Draining, NotServing, StoreUnavailable, Throttled

NOTHING_DONE = (Busy, Draining, NotServing, Throttled)
"""The broker did nothing: every request can be sent again."""
IN_DOUBT = (ConnectionFailed, StoreUnavailable)
"""Nobody knows whether the request took effect: only one that does no harm twice is sent again."""
REPEATED = (*NOTHING_DONE, *IN_DOUBT)
"""After these a request that does no harm twice is sent again."""
NEXT_CONNECTION = (ConnectionFailed, Draining, NotServing)
"""After these another connection comes, and what belongs to a connection is asked for again over that one."""
