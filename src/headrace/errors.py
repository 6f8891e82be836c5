"""Every error Headrace raises, for users to import: `from headrace.errors import DiskFull`."""

from headrace.model import errors as _errors
from headrace.model.errors import *  # noqa: F403 the same names, public here

__all__ = sorted(  # whichever the model has
    name for name, kind in vars(_errors).items() if isinstance(kind, type) and issubclass(kind, _errors.HeadraceError)
)
