"""Compressed bodies: unpacked as far as the limit allows, and packed for clients that ask for it."""

import asyncio
import zlib

from headrace.gateways.http.problems import HttpError

_GZIP_BITS = 31
"""zlib's word for: in the format of gzip."""
_STEP_BYTES = 256 << 10
"""Unpacked or packed in one go, so that other requests are served in between."""
_PACKED_MIN = 1024
_LEVEL = 1


async def unpack(body: bytes, encoding: bytes, bytes_max: int) -> bytes:
    """The body as it was before it was compressed, if that has no more bytes than allowed."""
    name = encoding.strip().lower()
    if name in (b"", b"identity"):
        return body
    if name not in (b"gzip", b"x-gzip"):
        raise HttpError(
            "unsupported_media_type",
            "a body is sent as it is, or with Content-Encoding gzip",
            headers=((b"accept-encoding", b"gzip"),),
        )
    unpacker = zlib.decompressobj(_GZIP_BITS)
    parts, size, rest = [], 0, body
    try:
        while rest and not unpacker.eof:
            part = unpacker.decompress(rest, _STEP_BYTES)
            size += len(part)
            if size > bytes_max:
                raise HttpError("body_too_large", f"the unpacked body has more than {bytes_max} bytes")
            parts.append(part)
            rest = unpacker.unconsumed_tail
            if rest:
                await asyncio.sleep(0)
    except zlib.error as error:
        raise HttpError("invalid_encoding", f"the body is not in the format of gzip: {error}") from error
    if not unpacker.eof or unpacker.unused_data:
        raise HttpError("invalid_encoding", "the body is not one whole stream in the format of gzip")
    return b"".join(parts)


def wants_gzip(accepted: bytes, size: int) -> bool:
    """Whether a client takes an answer of this size compressed, and it is worth it.

    >>> wants_gzip(b"br, gzip;q=0.5", 5000), wants_gzip(b"gzip;q=0", 5000), wants_gzip(b"gzip", 10)
    (True, False, False)
    """
    if size < _PACKED_MIN or b"gzip" not in accepted:
        return False
    for one in accepted.split(b","):
        name, _, weight = one.partition(b";")
        if name.strip().lower() == b"gzip":
            return weight.replace(b" ", b"").rstrip(b"0.") != b"q="
    return False


async def pack(body: bytes) -> bytes:
    """The body in the format of gzip."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_BITS)
    parts = []
    for start in range(0, len(body), _STEP_BYTES):
        if start:
            await asyncio.sleep(0)
        parts.append(packer.compress(body[start : start + _STEP_BYTES]))
    return b"".join([*parts, packer.flush()])
