"""The address of a shared store, as drivers get it: a URL in parts, and the credentials that go with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.storage.disk import Disk

TIMEOUT_SECONDS = 10.0
"""How long a store may take for a request, unless its URL says otherwise."""
_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class StoreAddress:
    """Where a store is, and how it is reached; `cluster/store_list.py` makes it of a URL."""

    scheme: str
    host: str = ""
    port: int | None = None
    user: str = ""
    path: str = ""
    """What follows the host, with its first slash if there is a host."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The query parameters."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The environment, and over it what the credentials file says, such as PGPASSWORD or REDIS_PASSWORD."""
    disk: Disk | None = field(default=None, repr=False)
    """The disk of stores that are directories."""

    @property
    def location(self) -> str:
        """The address without user and options."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = f":{self.port}" if self.port is not None else ""
        return f"{self.scheme}://{host}{port}{self.path}" if host or port else f"{self.scheme}:{self.path}"

    def check_options(self, *known: str) -> None:
        """Refuse options that the store does not have."""
        unknown = sorted(self.options.keys() - set(known))
        if unknown:
            there_are = f"there are {', '.join(sorted(known))}" if known else "it has none"
            raise InvalidArgument(f"stores of {self.scheme}: have no option {shown(unknown[0])}; {there_are}")

    def seconds(self, name: str = "timeout", default: float = TIMEOUT_SECONDS) -> float:
        """An option that is a number of seconds."""
        text = self.options.get(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0.1 <= value <= 3600:
            raise InvalidArgument(f"the option {name} is a number of seconds, 0.1 to 3600, not {shown(text)}")
        return value

    def count(self, name: str, default: int, most: int) -> int:
        """An option that is a number of things."""
        text = self.options.get(name, str(default))
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
            raise InvalidArgument(f"the option {name} is a whole number, 1 to {most}, not {shown(text)}")
        return int(text)

    def flag(self, name: str, default: bool = False) -> bool:
        """An option that is true or false."""
        text = self.options.get(name, "true" if default else "false")
        if text.lower() not in _WORDS:
            raise InvalidArgument(f"the option {name} is true or false, not {shown(text)}")
        return _WORDS[text.lower()]
