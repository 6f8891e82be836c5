"""Compressed bodies, gzip and zstd: unpacked as far as the limit allows, and packed for clients that ask for it."""

import asyncio
import sys
import zlib
from collections.abc import Iterator
from typing import Any

from headrace.gateways.http.accept import qualities
from headrace.gateways.http.problems import HttpError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_GZIP_BITS = 31
"""zlib's word for: in the format of gzip."""
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
"""The largest window that HTTP allows, 8 MiB (RFC 9659): so much memory a body may ask for before it is expanded."""
_STEP_BYTES = 256 << 10
"""Unpacked or packed in one go, so that other requests are served in between."""
_PACKED_MIN = 1024
_LEVEL = 1
_OFFERED = (b"zstd", b"gzip")
"""For answers, the better one first."""


async def unpack(body: bytes, encoding: bytes, bytes_max: int) -> bytes:
    """The body as it was before it was compressed, if that has no more bytes than allowed."""
    name = encoding.strip().lower().removeprefix(b"x-")
    if name in (b"", b"identity"):
        return body
    if name not in _OFFERED:
        raise HttpError(
            "unsupported_media_type",
            "a body is sent as it is, or with Content-Encoding gzip or zstd",
            headers=((b"accept-encoding", b"gzip, zstd"),),
        )
    parts: list[bytes] = []
    size = 0
    try:
        for part in _from_gzip(body) if name == b"gzip" else _from_zstd(body, bytes_max):
            size += len(part)
            if size > bytes_max:
                raise _too_large(bytes_max)
            if parts:
                await asyncio.sleep(0)
            parts.append(part)
    except (zlib.error, zstd.ZstdError) as error:
        raise HttpError("invalid_encoding", f"the body is not in the format of {name.decode()}: {error}") from error
    return b"".join(parts)


def _from_gzip(body: bytes) -> Iterator[bytes]:
    unpacker, rest = zlib.decompressobj(_GZIP_BITS), body
    while rest and not unpacker.eof:
        yield unpacker.decompress(rest, _STEP_BYTES)
        rest = unpacker.unconsumed_tail
    _check_whole(unpacker, "gzip")


def _from_zstd(body: bytes, bytes_max: int) -> Iterator[bytes]:
    """The parts of one frame; its head tells before anything is expanded if it is too large."""
    if (zstd.get_frame_info(body).decompressed_size or 0) > bytes_max:
        raise _too_large(bytes_max)
    unpacker, at = zstd.ZstdDecompressor(options=_ZSTD_OPTIONS), 0
    while not unpacker.eof and (at < len(body) or not unpacker.needs_input):
        given = b""
        if unpacker.needs_input:
            given = body[at : at + _STEP_BYTES]
            at += len(given)
        yield unpacker.decompress(given, _STEP_BYTES)
    _check_whole(unpacker, "zstd", has_more=at < len(body))


def _check_whole(unpacker: Any, name: str, *, has_more: bool = False) -> None:
    if not unpacker.eof or unpacker.unused_data or has_more:
        raise HttpError("invalid_encoding", f"the body is not one whole stream in the format of {name}")


def _too_large(bytes_max: int) -> HttpError:
    return HttpError("body_too_large", f"the unpacked body has more than {bytes_max} bytes")


def chosen_encoding(accepted: bytes, size: int) -> bytes:
    """The encoding that a client likes best for an answer of this size; empty to send it as it is.

    >>> chosen_encoding(b"br, gzip;q=0.5", 5000), chosen_encoding(b"gzip, zstd", 5000), chosen_encoding(b"gzip", 10)
    (b'gzip', b'zstd', b'')
    >>> chosen_encoding(b"gzip;q=0, *;q=0.1", 5000), chosen_encoding(b"identity, gzip;q=0.5", 5000)
    (b'zstd', b'')
    """
    if size < _PACKED_MIN:
        return b""
    liked = qualities(accepted)
    others = liked.get(b"*", 0.0)
    best, name = max(((liked.get(name, others), name) for name in _OFFERED), key=lambda offer: offer[0])
    return name if best > 0 and best >= liked.get(b"identity", 0.0) else b""


async def pack(body: bytes, encoding: bytes) -> bytes:
    """The body in the format of an encoding that `chosen_encoding` names."""
    packer: Any = zstd.ZstdCompressor(_LEVEL) if encoding == b"zstd" else zlib.compressobj(_LEVEL, wbits=_GZIP_BITS)
    parts = []
    for start in range(0, len(body), _STEP_BYTES):
        if start:
            await asyncio.sleep(0)
        parts.append(packer.compress(body[start : start + _STEP_BYTES]))
    return b"".join([*parts, packer.flush()])
