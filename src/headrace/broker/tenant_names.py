"""Names at the door of the broker: those of a session's requests get its tenant, those of the answers lose it.

Inside the broker a name of the default tenant is plain, and one of another tenant begins with the tenant and a slash.
So sessions of the default tenant need nothing of this, and pay nothing for it.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.model.arguments import shown
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.request import Answer, Request, Resource, WireStruct
from headrace.model.topic import DEFAULT_TENANT, tenant_of

RequestType = TypeVar("RequestType", bound=Request[Any])

_PLAIN = frozenset({Resource.TRANSACTION})
"""Resources that nobody may name with a tenant."""


class NamePath(NamedTuple):
    """Where names stand in a request or an answer: fields, each below the one before."""

    fields: tuple[str, ...]
    is_plain: bool = False
    """Whether nobody may say it with a tenant."""


class TenantNames:
    """Translates between the names that sessions of a tenant use and those that the broker uses.

    >>> names = TenantNames("acme")
    >>> names.qualified_name("orders")
    'acme/orders'
    """

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._prefix = f"{tenant}/"
        # Not within a path, where a directory may have the tenant's name.
        self._in_text = re.compile(rf"(?<![\w./-]){re.escape(self._prefix)}")

    def qualified_name(self, name: str, *, is_plain: bool = False) -> str:
        """The broker's name for one that a session says; refuses names of other tenants."""
        if is_plain:
            check_plain(name)
        if not name or name.startswith(self._prefix):
            return name
        if "/" in name:
            raise InvalidArgument(
                f"{shown(name)} is not a name of the tenant {self._tenant}, and this session can use no other's; "
                "leave the tenant out, or connect with another tenant"
            )
        return self._prefix + name

    def qualified(self, request: RequestType) -> RequestType:
        """A copy of the request in which all names have the tenant."""
        kind: type[WireStruct] = type(request)
        for fields, is_plain in name_paths(kind):
            request = _replaced(request, fields, partial(self.qualified_name, is_plain=is_plain))
        return request

    def translated_outcome(self, outcome: Any) -> Any:
        """The answer, there or still to come, without the tenant in its names; a stream has none."""
        if not isinstance(outcome, PendingAnswer):
            return self.translated(outcome)
        pending: PendingAnswer[Any] = PendingAnswer()
        outcome.then(lambda resolved: pending.resolve(self.translated(resolved)))
        pending.then(partial(_cancel, outcome))
        return pending

    def translated(self, outcome: Any) -> Any:
        """An answer, or an error, without the tenant in its names."""
        if isinstance(outcome, HeadraceError):
            return self._translated_error(outcome)
        if isinstance(outcome, AnswerWithBody):
            return AnswerWithBody(self.translated(outcome.answer), outcome.body)
        if isinstance(outcome, Answer):
            kind: type[Answer] = type(outcome)
            for fields, _ in name_paths(kind):
                outcome = _replaced(outcome, fields, self._bare, self._is_own)
        return outcome

    def _translated_error(self, error: HeadraceError) -> HeadraceError:
        told = copy.copy(error)
        told.args = tuple(self._in_text.sub("", arg) if isinstance(arg, str) else arg for arg in error.args)
        told.details = {name: self._bare_detail(detail) for name, detail in error.details.items()}
        return told

    def _bare_detail(self, detail: Any) -> Any:
        if isinstance(detail, str):
            return detail.removeprefix(self._prefix)
        return [self._bare_detail(one) for one in detail] if isinstance(detail, list) else detail

    def _bare(self, name: str) -> str:
        """The name as sessions of the tenant see it: another tenant's, which is rare, with that tenant."""
        if name.startswith(self._prefix):
            return name[len(self._prefix) :]
        return name if "/" in name or not name else f"{DEFAULT_TENANT}/{name}"

    def _is_own(self, name: object) -> bool:
        """Whether the tenant may see a name in a list: others' groups may read a topic, too."""
        return not isinstance(name, str) or name.startswith(self._prefix)


def check_plain(name: object) -> None:
    """Refuse a transaction's name with a slash: it could be that of another tenant's transaction."""
    if isinstance(name, str) and "/" in name:
        raise InvalidArgument(
            f"a transaction's name has no `/`, as {shown(name)} was given with: `/` separates the tenant from a name; "
            "leave the tenant out, or use another character"
        )


def count_names(names: Iterable[str], tenant: str | None) -> int:
    """How many of the names are a tenant's; without a tenant, how many there are."""
    return sum(1 for name in names if tenant is None or tenant_of(name) == tenant)


def _cancel(outcome: PendingAnswer[Any], _: object) -> None:
    """Withdraw a request whose translated answer was cancelled; without effect on one that was answered."""
    outcome.cancel()


@cache
def name_paths(kind: type[WireStruct]) -> tuple[NamePath, ...]:
    """Where names stand in a request or an answer: what it declares, and what the structs in it do."""
    paths = {NamePath(tuple(field.split("."))) for field in kind.tenant_fields}
    if issubclass(kind, Request):
        for permission in kind.declared.permissions:
            if permission.field:
                paths.add(NamePath(tuple(permission.field.split(".")), permission.resource in _PLAIN))
    for field in msgspec.structs.fields(kind):
        for part in _structs_in(field.type):
            paths |= {NamePath((field.name, *below), is_plain) for below, is_plain in name_paths(part)}
    return tuple(sorted(paths))


def _structs_in(of: Any) -> Iterator[type[WireStruct]]:
    if isinstance(of, type) and issubclass(of, WireStruct):
        yield of
    for argument in get_args(of):
        yield from _structs_in(argument)


def _replaced(
    part: Any,
    fields: tuple[str, ...],
    change: Callable[[str], str],
    wanted: Callable[[object], bool] = lambda _: True,
) -> Any:
    """A copy of the part with the names below these fields changed, and those in lists that are not wanted left out."""
    if isinstance(part, list):
        return [_replaced(one, fields, change) for one in part if wanted(one)]
    if part is None:
        return None
    if not fields:
        return change(part) if isinstance(part, str) else part  # else whoever handles the request refuses it
    name, *rest = fields
    if isinstance(part, dict):
        return {**part, name: _replaced(part[name], tuple(rest), change)} if name in part else part
    if not isinstance(part, msgspec.Struct):
        return part  # whoever handles the request refuses it
    return msgspec.structs.replace(part, **{name: _replaced(getattr(part, name), tuple(rest), change, wanted)})
