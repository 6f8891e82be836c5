"""The environment variables that say where the broker is; a module of its own, because every command loads it."""

URL_VARIABLE = "HEADRACE_URL"
"""The address to use where none is given."""
CONTEXT_VARIABLE = "HEADRACE_CONTEXT"
"""The name of the context whose address commands use; the Python API does not read it."""
TENANT_VARIABLE = "HEADRACE_TENANT"
"""The tenant that commands use where none is given; the Python API does not read it."""
