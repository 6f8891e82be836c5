"""Verifies what a checkpoint reads of the local disk, which may have changed bytes since they were written."""

from collections.abc import Iterable, Mapping

from headrace.storage.record import is_readable
from headrace.storage.replicated import checkpoint_format
from headrace.storage.replicated.checkpoint_format import CheckpointFile, digest_of, path_bytes
from headrace.storage.replicated.damage import is_record, is_segment, scan_segment
from headrace.storage.replicated.snapshot import F, ShardSnapshot


class CheckpointVerifier:
    """Compares files with the checkpoint before; of what is new in segments it verifies the checksums of the batches.

    Damage is reported to the snapshot, which raises unless the store has the same bytes: the checkpoint is not made.
    """

    def __init__(self) -> None:
        self._stored: dict[bytes, CheckpointFile] = {}
        """The files of the checkpoint before, of this owner or an earlier one, by their paths."""
        self._appended: dict[object, CheckpointFile] = {}
        """Those of them that were only appended to since this epoch began, by their identities."""
        self._verified: dict[object, int] = {}
        """The end of the batches of each segment that were verified in this epoch, by its identity."""

    def note_stored(self, files: Iterable[CheckpointFile], appended: Mapping[object, CheckpointFile]) -> None:
        """Take the checkpoint that was stored last."""
        self._stored = {file.path: file for file in files}
        self._appended = dict(appended)
        self._verified = {file: end for file, end in self._verified.items() if file in appended}

    def compare(self, snapshot: ShardSnapshot[F], file: F, trusted: int, begin: int, data: bytes) -> int:
        """Compare a chunk as it was read with the checkpoint before; returns how far the file is known to be right.

        Bytes that were not written since that checkpoint must be the same.
        """
        appended = None if file.is_overwritten else self._appended.get(file.identity)
        stored = appended or self._stored.get(path_bytes(file.path))
        number = begin // checkpoint_format.CHUNK_BYTES
        if stored is None or trusted != begin or number >= len(stored.chunks):
            return trusted
        length = min(checkpoint_format.CHUNK_BYTES, stored.data_end - begin)
        if digest_of(memoryview(data)[:length]) == stored.chunks[number].digest:
            return begin + length
        if appended is not None:
            snapshot.report_damage(file, begin, "it differs from the checkpoint before")
        return trusted

    def verify(self, snapshot: ShardSnapshot[F], file: F, trusted: int) -> None:
        """Verify a record, or the batches of a segment, that are not known to be right."""
        if trusted >= file.data_end or file.is_torn:
            return
        if is_record(file.path) and not is_readable(snapshot.read(file, 0, file.data_end).ljust(file.length, b"\0")):
            snapshot.report_damage(file, 0, "no slot of the record can be read")
        if not is_segment(file.path):
            return
        start = 0 if file.is_overwritten else self._verified.get(file.identity, 0)

        def read(position: int, length: int) -> bytes:
            data = snapshot.read(file, position, length)
            return data.ljust(min(length, file.length - position), b"\0")  # also the zeros behind the data

        for begin, end, damage in scan_segment(file.path, read, file.length, start):
            if damage and end > trusted:
                snapshot.report_damage(file, begin, damage)
            elif not damage and file.identity is not None:
                self._verified[file.identity] = end
