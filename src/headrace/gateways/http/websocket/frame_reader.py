"""Parses what a client sends over a WebSocket a little at a time: frames may be tiny, and many of them come at once."""

from websockets.frames import CTRL_OPCODES, CloseCode, Frame, Opcode
from websockets.protocol import Protocol, State

from headrace.model.errors import LimitExceeded
from headrace.model.limits import SOCKET_CONTROL_FRAMES_MAX, SOCKET_FRAGMENTS_MAX

_SLICE_BYTES = 1 << 10
_TURN_FRAMES = 64
"""Frames after which no other slice is parsed before others have their turn."""


class FrameReader:
    """The received bytes of one connection, and the limits on what they may be."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._unread = bytearray()
        """Received, and not parsed."""
        self._fragments = 0
        """Of the message that has not ended."""
        self._control_frames = 0
        self._counted_since_s = 0.0

    @property
    def has_more(self) -> bool:
        """Whether received bytes wait to be parsed."""
        return bool(self._unread)

    @property
    def held_bytes(self) -> int:
        """The memory of what is no whole frame yet."""
        return len(self._unread) + len(self._protocol.reader.buffer)

    def add(self, data: bytes) -> None:
        """Take received bytes; `parse` parses them."""
        self._unread += data

    def clear(self) -> None:
        """Forget what was not parsed."""
        self._unread.clear()

    def parse(self, now_s: float) -> list[Frame]:
        """Parse as much as one loop turn has time for; the protocol fails where a limit is exceeded."""
        protocol, frames, start = self._protocol, list[Frame](), 0
        while start < len(self._unread) and len(frames) < _TURN_FRAMES and protocol.state is State.OPEN:
            protocol.receive_data(bytes(self._unread[start : start + _SLICE_BYTES]))
            start += _SLICE_BYTES
            frames += [event for event in protocol.events_received() if isinstance(event, Frame)]
        del self._unread[:start]
        if wrong := self._excess(frames, now_s):
            if protocol.state is State.OPEN:
                protocol.fail(CloseCode.POLICY_VIOLATION, f"{LimitExceeded.code}: {wrong}")
            frames.clear()
        return frames

    def _excess(self, frames: list[Frame], now_s: float) -> str:
        """Count frames; returns what there are too many of."""
        if now_s - self._counted_since_s > 1:
            self._counted_since_s, self._control_frames = now_s, 0
        for frame in frames:
            if frame.opcode in CTRL_OPCODES:
                self._control_frames += 1
            else:
                self._fragments = 1 if frame.opcode is not Opcode.CONT else self._fragments + 1
            if self._fragments > SOCKET_FRAGMENTS_MAX:
                return f"a message has at most {SOCKET_FRAGMENTS_MAX} fragments"
        if self._control_frames > SOCKET_CONTROL_FRAMES_MAX:
            return f"a client sends at most {SOCKET_CONTROL_FRAMES_MAX} pings and pongs per second"
        return ""
