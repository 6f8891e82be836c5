"""Checks packed columns of byte strings without decoding them."""

_WALKED_BYTES = 1024
"""Above this size of a message, stepping from one to the next is faster than copying them."""
_NIL = 0xC0
_HEAD_BYTES = {0xC4: 2, 0xC5: 3, 0xC6: 5}
"""The length of a byte string's head, type and length, by its type."""


def column_end(body: bytes | bytearray | memoryview, start: int, count: int) -> int:
    """Return the end position of an array of `count` byte strings or nils; 0 if the bytes are something else.

    0 also when decoding them would take less time than looking for it: when they are small and differ in length.
    """
    end = uniform_column_end(body, start, count)
    return end if end or len(body) - start < count * _WALKED_BYTES else _walked_column_end(body, start, count)


def uniform_column_end(body: bytes | bytearray | memoryview, start: int, count: int) -> int:
    """Return the end position of an array of `count` byte strings of one length; 0 if the bytes are something else.

    Every entry begins where the one before it ends, because each says the same length. So it is enough to compare the
    heads of all entries, which strided views do in two nanoseconds a byte.
    """
    begin = _array_head(count)
    first = start + len(begin)
    head_bytes = _HEAD_BYTES.get(body[first], 0) if first < len(body) else 0
    if not head_bytes or body[start:first] != begin:
        return 0
    view = memoryview(body)
    head = bytes(view[first : first + head_bytes])
    stride = head_bytes + int.from_bytes(head[1:])
    end = first + count * stride
    if end > len(view):
        return 0
    if head_bytes == 2 and not stride % 2:  # both bytes at once
        same = view[first:end].cast("H")[:: stride // 2] == memoryview(head * count).cast("H")
    else:
        same = all(view[first + at : end : stride] == head[at : at + 1] * count for at in range(head_bytes))
    return end if same else 0


def _walked_column_end(body: bytes | bytearray | memoryview, start: int, count: int) -> int:
    begin = _array_head(count)
    at, view = start + len(begin), memoryview(body)
    if body[start:at] != begin:
        return 0
    for _ in range(count):
        kind = view[at] if at < len(view) else 0
        head_bytes = _HEAD_BYTES.get(kind, 0)
        if head_bytes:
            at += head_bytes + int.from_bytes(view[at + 1 : at + head_bytes])
        elif kind == _NIL:
            at += 1
        else:
            return 0
    return at if at <= len(view) else 0


def _array_head(count: int) -> bytes:
    """Return the MessagePack head of an array."""
    if count < 1 << 4:
        return b"%c" % (0x90 | count)
    return b"\xdc" + count.to_bytes(2) if count < 1 << 16 else b"\xdd" + count.to_bytes(4)
