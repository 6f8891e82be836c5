"""Verification of an audit trail: detects records that were removed, altered, reordered or added by others."""

from collections.abc import Iterable

import msgspec

from headrace.model.audit import BROKEN, NO_DIGEST, AuditHead, AuditRecord, decode_record, record_digest
from headrace.model.errors import InvalidArgument

_FINDINGS_MAX = 1000


class AuditFinding(msgspec.Struct, frozen=True):
    """Something that is wrong with a trail."""

    kind: str
    """`missing`, `altered`, `reordered`, `unreadable` or `broken`."""
    offset: int
    """Where: the offset of the first record that does not fit."""
    text: str


class AuditReport(msgspec.Struct, kw_only=True):
    """The result of a verification."""

    records: int = 0
    """Records that were read."""
    first_number: int = 0
    """The number of the oldest record; above 1 if older ones were removed by retention or trimming."""
    head: AuditHead = AuditHead()
    """The newest record."""
    findings: list[AuditFinding] = []
    truncated: bool = False
    """Whether there is more to tell than `findings` has."""

    @property
    def intact(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


class ChainVerifier:
    """Takes the records of a trail one after the other, and reports.

    >>> verifier = ChainVerifier()
    >>> verifier.take(0, b'{"number": 1}')
    >>> [finding.kind for finding in verifier.report().findings]
    ['unreadable']
    """

    def __init__(self, *, from_start: bool = False, heads: Iterable[AuditHead] = ()) -> None:
        """`from_start`: a trail whose oldest records are gone is not accepted. `heads` must be in the trail."""
        self._from_start = from_start
        self._heads = {head.number: head for head in heads if head.number}
        self._report = AuditReport()
        self._previous: AuditRecord | None = None
        self._digest = NO_DIGEST

    def take(self, offset: int, content: bytes | None) -> None:
        """Take the next record."""
        report = self._report
        report.records += 1
        try:
            if content is None:
                raise InvalidArgument("the messages here are damaged or were removed")
            record = decode_record(content)
        except InvalidArgument as error:
            self._find("unreadable", offset, str(error))
            self._previous = None
            return
        if report.first_number == 0:
            self._take_first(offset, record)
        else:
            self._take_next(offset, record)
        if record.action == BROKEN:
            self._find("broken", offset, f"the broker found the trail broken when it started: {record.details}")
        self._previous, self._digest = record, record_digest(content)
        report.head = AuditHead(record.number, self._digest, offset)
        known = self._heads.pop(record.number, None)
        if known is not None and known.digest != self._digest:
            self._find(
                "altered", offset, f"record {record.number} has not the digest that it had: the trail was replaced"
            )

    def report(self) -> AuditReport:
        """Tell what was found; the heads that did not occur are missing."""
        report = self._report
        for head in sorted(self._heads.values(), key=lambda head: head.number):
            if head.number >= max(report.first_number, 1):
                text = f"record {head.number} is missing, which was there before: the end of the trail was removed"
                if report.records and self._previous is None:
                    text = f"record {head.number} is not among those that can be read: it was altered, or removed"
                self._find("missing", report.head.offset + 1, text)
            elif self._from_start:
                self._find("missing", 0, f"record {head.number} is not there any more")
        self._heads.clear()
        return report

    def _take_first(self, offset: int, record: AuditRecord) -> None:
        self._report.first_number = record.number
        if record.number == 1 and record.previous != NO_DIGEST:
            self._find("altered", offset, "the first record has a digest of a record before it")
        elif record.number > 1 and (self._from_start or offset == 0):
            self._find("missing", offset, f"records 1 to {record.number - 1} are missing at the beginning")

    def _take_next(self, offset: int, record: AuditRecord) -> None:
        if self._previous is None:  # after one that could not be read: the chain begins anew
            return
        expected = self._previous.number + 1
        if record.number == expected and record.previous == self._digest:
            return
        if record.number > expected:
            self._find("missing", offset, f"records {expected} to {record.number - 1} are missing")
        elif record.number < expected:
            self._find("reordered", offset, f"record {record.number} stands after record {expected - 1}")
        else:
            text = f"record {expected - 1} was altered, or record {record.number} does not belong to this trail"
            self._find("altered", offset, text)

    def _find(self, kind: str, offset: int, text: str) -> None:
        if len(self._report.findings) < _FINDINGS_MAX:
            self._report.findings.append(AuditFinding(kind, offset, text))
        else:
            self._report.truncated = True
