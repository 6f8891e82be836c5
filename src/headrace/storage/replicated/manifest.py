"""The manifest of a shard: who owns it. It is changed by compare-and-set only."""

import msgspec

FORMAT = 1
"""The format of WAL objects, checkpoints and the files in them that this Headrace writes."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a shard, and where to begin when it is restored. FORMAT.md has every field."""

    epoch: int
    """Raised by each claim."""
    owner: str = ""
    """The name of the node that made the epoch."""
    addresses: tuple[str, ...] = ()
    """Where clients reach the owner: URLs, the native protocol's first."""
    checkpoint: str = ""
    """The name of the newest checkpoint; empty before the first."""
    oldest: str = ""
    """The name of the oldest checkpoint that is kept, with all WAL objects from its position on; empty: all are kept.

    Nothing from there on is ever deleted before the manifest names a later one.
    """
    format: int = FORMAT
    """A node never claims a shard with a higher format than it knows."""
    released: bool = False
    """Whether the owner has stopped, with everything stored: the next claim need not wait for anything."""
    successor: str = ""
    """The node that is to claim a released shard; empty: any."""
    change: int = 0
    """Counts the changes."""
    nonce: str = ""
    """Another random text with each change, so that a writer recognises its own after a lost answer."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest."""
    return _encoder.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in these bytes."""
    return _decoder.decode(data)
