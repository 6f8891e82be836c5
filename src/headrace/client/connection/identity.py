"""Names by which a broker's lists and logs tell clients apart: host, process, and which bus of it."""

import itertools
import os
import re
import secrets
import socket

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.topic import checked_tenant

NAME_CHARS_MAX = 120
_HOST_CHARS_MAX = 60
_MEMBER_NAME_CHARS_MAX = 100
_numbers = itertools.count(1)


def default_name() -> str:
    """A name such as `web-3.example.org-4711-1`; a forked child has another."""
    return f"{_host()}-{os.getpid()}-{next(_numbers)}"


def checked_client_name(name: object) -> str:
    """What a program calls itself; empty if the client is to make up a name."""
    if not isinstance(name, str) or len(name) > NAME_CHARS_MAX or not name.isprintable():
        raise InvalidArgument(f"name is a text of up to {NAME_CHARS_MAX} printable characters, not {shown(name)}")
    return name


def checked_client_tenant(tenant: object) -> str:
    """The tenant that a program names; empty if it names none."""
    if not isinstance(tenant, str):
        raise InvalidArgument(f"tenant is a text, not {shown(tenant)}")
    return checked_tenant(tenant) if tenant else ""


def member_id(client: str) -> str:
    """An id for a member of a group: the client's name, and something that no other member has.

    Members are told apart by it, and hosts with the same name may have processes with the same number.
    """
    return f"{client[:_MEMBER_NAME_CHARS_MAX]}-{secrets.token_hex(4)}"


def _host() -> str:
    """The host's name, with letters, digits, `.`, `_` and `-` only, beginning with a letter or digit."""
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname())[:_HOST_CHARS_MAX]
    return host.strip("._-") or "host"
