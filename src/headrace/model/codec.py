"""How a batch's body may be compressed."""

import struct
import sys
from enum import IntEnum

import lz4.block

from headrace.model.errors import InvalidBatch
from headrace.model.limits import BATCH_BYTES_MAX, BODY_EXPANSION_MAX

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_RAW_LENGTH = struct.Struct("<I")
_ZSTD_LEVEL = 1
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 25}
"""A frame cannot ask for a window of more memory than the largest batch has."""


class Codec(IntEnum):
    """Compression of a batch's body."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


def compress(codec: Codec, raw: bytes | bytearray | memoryview) -> bytes:
    """The compressed form: the raw length as u32, then an LZ4 block or a Zstandard frame."""
    if codec is Codec.LZ4:
        packed: bytes = lz4.block.compress(raw, store_size=False)
    else:
        packed = zstd.compress(raw, level=_ZSTD_LEVEL)
    return _RAW_LENGTH.pack(len(raw)) + packed


def expands_too_far(raw_length: int, body_bytes: int) -> bool:
    """Return whether a compressed body claims too large a length for its size: a decompression bomb."""
    return raw_length > body_bytes * BODY_EXPANSION_MAX


def decompress(codec: int, body: memoryview) -> bytes:
    """The raw body; refused when it claims to be larger than a body may be, or is not exactly what it claims."""
    if len(body) < _RAW_LENGTH.size:
        raise InvalidBatch("a compressed body is too short to hold its length")
    (raw_length,) = _RAW_LENGTH.unpack_from(body)
    if raw_length > BATCH_BYTES_MAX:
        raise InvalidBatch(f"a compressed body claims {raw_length} bytes, more than {BATCH_BYTES_MAX}")
    if expands_too_far(raw_length, len(body)):
        raise InvalidBatch(
            f"a compressed body of {len(body)} bytes claims {raw_length}, more than {BODY_EXPANSION_MAX} times as many"
        )
    packed = body[_RAW_LENGTH.size :]
    try:
        if codec == Codec.LZ4:
            raw: bytes = lz4.block.decompress(packed, uncompressed_size=raw_length)
        elif codec == Codec.ZSTD:
            raw = _from_zstd(packed, raw_length)
        else:
            raise InvalidBatch(f"codec {codec} is unknown")
    except (lz4.block.LZ4BlockError, zstd.ZstdError, ValueError) as error:
        raise InvalidBatch(f"a body does not decompress: {error}") from error
    if len(raw) != raw_length:
        raise InvalidBatch(f"a body decompressed to {len(raw)} bytes instead of {raw_length}")
    return raw


def _from_zstd(packed: memoryview, raw_length: int) -> bytes:
    """Decompress exactly one Zstandard frame."""
    decompressor = zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)
    # Asking for one byte more than claimed shows a frame that holds more, without decompressing all of it.
    raw = decompressor.decompress(packed, raw_length + 1)
    if len(raw) <= raw_length and (not decompressor.eof or decompressor.unused_data):
        raise InvalidBatch("a body is not one whole Zstandard frame")
    return raw
