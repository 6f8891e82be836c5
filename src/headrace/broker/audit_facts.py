"""The fact about audit trails: how far each was stored, so that a trail that became shorter is noticed."""

from collections.abc import Iterator

from headrace.broker.fact import Fact
from headrace.model.audit import AuditHead


class AuditCheckpointed(Fact, tag=150):
    """The trail of a tenant had this last record, synced."""

    tenant: str
    number: int
    digest: str
    offset: int


class AuditState:
    """The last checkpoint of each tenant's trail."""

    def __init__(self) -> None:
        self._heads: dict[str, AuditHead] = {}

    def apply(self, fact: AuditCheckpointed) -> None:
        """Apply a fact."""
        self._heads[fact.tenant] = AuditHead(fact.number, fact.digest, fact.offset)

    def head(self, tenant: str) -> AuditHead:
        """The last checkpoint of a tenant's trail."""
        return self._heads.get(tenant) or AuditHead()

    def forget(self, tenant: str) -> None:
        """Forget the trail of a tenant that was deleted."""
        self._heads.pop(tenant, None)

    def facts(self) -> Iterator[Fact]:
        """The facts that tell all of it."""
        for tenant, head in self._heads.items():
            yield AuditCheckpointed(tenant, head.number, head.digest, head.offset)
