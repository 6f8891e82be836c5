"""The payload of benchmarks, and the check that all of it is read back."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from random import Random
from typing import Any

from headrace.bench.measure import WrongResult, check
from headrace.embedded.log import Log
from headrace.model.errors import InvalidArgument
from headrace.model.limits import BATCH_BYTES_MAX, BATCH_COUNT_MAX

SAMPLE_BYTES_MAX = 1 << 30
"""The maximum payload of a sample, in bytes."""
_POOL_BATCHES, _POOL_BYTES = 64, 16 << 20


class Payload:
    """Values to append, in batches; they repeat only after many, so that a lost or swapped one is noticed."""

    def __init__(self, size: int = 100, batch: int = 1000) -> None:
        if size < 1 or not 1 <= batch <= BATCH_COUNT_MAX or size * batch > BATCH_BYTES_MAX // 2:
            raise InvalidArgument(
                f"a batch of {batch} values of {size} bytes cannot be measured: a batch has 1 to {BATCH_COUNT_MAX} "
                f"values of 1 byte or more, and at most {BATCH_BYTES_MAX // 2} bytes"
            )
        self.size = size
        self.batch = batch
        random = Random(size)
        count = max(min(_POOL_BATCHES, _POOL_BYTES // (size * batch)), 1)
        self.pool: list[list[bytes]] = [[random.randbytes(size) for _ in range(batch)] for _ in range(count)]
        flat = [value for values in self.pool for value in values]
        self._period = len(flat)
        self._flat = flat + flat

    def batches(self, count: int) -> Iterator[list[bytes]]:
        """The first values, so many, which fill whole batches."""
        assert count % self.batch == 0
        return islice(cycle(self.pool), count // self.batch)

    def values(self, count: int) -> Iterator[bytes]:
        """The first values, one by one."""
        return islice(cycle(islice(self._flat, self._period)), count)

    def expected(self, offset: int, count: int) -> Sequence[bytes]:
        """The values that belong to offsets."""
        start = offset % self._period
        if start + count <= len(self._flat):
            return self._flat[start : start + count]
        return [self._flat[at % self._period] for at in range(start, start + count)]

    def check(self, lists: Iterable[Sequence[bytes | None]], count: int) -> None:
        """Fail unless these are the first values, all of them, in order."""
        offset = 0
        for values in lists:
            if list(values) != self.expected(offset, len(values)):
                raise WrongResult(f"wrong values between offset {offset} and {offset + len(values)}")
            offset += len(values)
        check(offset == count, f"{offset} messages came back of {count}")

    def check_log(self, place: str, count: int) -> None:
        """Fail unless the log in a directory holds just the first values; all checksums are checked too."""
        with Log(place, readonly=True) as log:
            self.check((batch.columns().values for batch in log.batches()), count)

    def fill(self, place: str, count: int) -> None:
        """Make a log of the first values."""
        with Log(place) as log:
            for values in self.batches(count):
                log.append_many(values)

    @property
    def params(self) -> dict[str, Any]:
        """What is told of it."""
        return {"size": self.size, "batch": self.batch}

    @property
    def count_max(self) -> int:
        """The most messages that a sample may write."""
        return max(SAMPLE_BYTES_MAX // self.size, self.batch)
