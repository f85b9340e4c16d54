"""The bytes of ZMTP 3, ZeroMQ's protocol, on a plaintext connection: greeting, commands and frames, with bounds.

libzmq holds the frames of a message until the last one has arrived, without a bound on their number. A server that
reads the protocol itself can cut a connection at the first frame too many.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
MAX_FRAMES = 8
"""The most frames in one message; with more, the connection is cut. A request has three; 4 to 8 give an error reply."""
MAX_COMMAND_BYTES = 4096
CHUNK_BYTES = 1 << 18

GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes((3, 1)) + b"NULL".ljust(20, b"\0") + bytes(32)


class ProtocolError(Exception):
    """The received data is not ZMTP or exceeds a limit; the connection must be cut."""


def command(name: bytes, body: bytes = b"") -> bytes:
    data = bytes((len(name),)) + name + body
    return bytes((COMMAND, len(data))) + data


def ready(socket_type: bytes) -> bytes:
    """The command that ends a handshake."""
    properties = ((b"Socket-Type", socket_type), (b"Identity", b""))
    body = b"".join(bytes((len(name),)) + name + struct.pack(">I", len(value)) + value for name, value in properties)
    return command(b"READY", body)


def message(frames: list[Any]) -> list[memoryview]:
    """The buffers of one message on the wire."""
    parts: list[memoryview] = []
    last = len(frames) - 1
    for position, frame in enumerate(frames):
        view = memoryview(frame)
        flags, size = MORE if position < last else 0, view.nbytes
        head = bytes((flags, size)) if size < 256 else struct.pack(">BQ", flags | LONG, size)
        parts.append(memoryview(head))
        if size:
            parts.append(view.cast("B"))
    return parts


class Reader:
    """Parses the bytes of one peer, from its greeting on. Read into `buffer`; `received` returns complete messages.

    A frame's memory is allocated when its length is known and touched as its bytes arrive; ``pending_bytes`` counts
    the bytes received of an incomplete message.
    """

    def __init__(self, max_frame_bytes: int, max_message_bytes: int) -> None:
        self._max_frame, self._max_message = max_frame_bytes, max_message_bytes
        self._greeted = self.established = False
        self._head = b""  # of an incomplete frame or greeting
        self._frames: list[memoryview] = []
        self._frame: memoryview | None = None  # the frame being filled
        self._filled = 0
        self._flags = 0
        self.pending_bytes = 0
        self.replies: list[bytes] = []
        """Bytes to send to the peer: the rest of the handshake, and replies to its heartbeats."""

    def buffer(self, scratch: memoryview) -> memoryview:
        """The buffer for the next bytes: the rest of the frame being filled, or ``scratch``."""
        if self._frame is not None and len(self._frame) - self._filled >= len(scratch):
            return self._frame[self._filled :]
        return scratch

    def received(self, data: memoryview) -> list[list[memoryview]]:
        """Parse the bytes that were read into `buffer`'s result; returns the messages that are now complete.

        Raises:
            ProtocolError: the connection must be cut.
        """
        if self._frame is not None and data.obj is self._frame.obj:
            self._filled += len(data)
            self.pending_bytes += len(data)
            return self._end_frame([])
        whole: list[list[memoryview]] = []
        at = 0
        if self._frame is not None:
            at = self._fill(data, 0)
            self._end_frame(whole)
        if self._head:  # a few bytes of it have arrived
            joined = memoryview(self._head + bytes(data[at:]))
            self._head = b""
            data, at = joined, 0
        if not self._greeted:
            at = self._greeting(data)
        while self._greeted and at < len(data):
            begun = self._begin_frame(data, at)
            if begun < 0:
                break
            at = self._fill(data, begun)
            self._end_frame(whole)
        if at < len(data):
            self._head = bytes(data[at:])
        return whole

    def _greeting(self, data: memoryview) -> int:
        if data[0] != 0xFF or (len(data) > 9 and not data[9] & 1) or (len(data) > 10 and data[10] < 3):
            raise ProtocolError("it does not speak ZMTP 3")
        if len(data) < GREETING_BYTES:
            return 0
        if bytes(data[12:32]).rstrip(b"\0") != b"NULL":
            raise ProtocolError(
                f"it wants the mechanism {bytes(data[12:32]).rstrip(bytes(1))!r}, but the server has no keys"
            )
        self._greeted = True
        self.replies.append(ready(b"ROUTER"))
        return GREETING_BYTES

    def _begin_frame(self, data: memoryview, at: int) -> int:
        """Read the head of a frame; returns where its body begins, or -1 if the head is incomplete."""
        flags, left = data[at], len(data) - at
        if flags & ~7 or (flags & COMMAND and flags & MORE):
            raise ProtocolError(f"a frame has the flags {flags:#x}")
        if left < (9 if flags & LONG else 2):
            return -1
        size = struct.unpack_from(">Q", data, at + 1)[0] if flags & LONG else data[at + 1]
        if flags & COMMAND or not self.established:
            if not flags & COMMAND or size > MAX_COMMAND_BYTES:
                raise ProtocolError("its handshake or one of its commands is malformed")
        elif size > self._max_frame or self.pending_bytes + size > self._max_message:
            raise ProtocolError(f"a frame must have at most {self._max_frame} bytes, got {size}")
        elif len(self._frames) >= MAX_FRAMES:
            raise ProtocolError(f"a message has more than {MAX_FRAMES} frames")
        self._flags = flags
        try:
            room: Any = np.empty(size, np.uint8)
            self._frame = memoryview(room).cast("B") if size else memoryview(b"")
        except MemoryError:
            raise ProtocolError(f"there is no memory for a frame of {size} bytes") from None
        self._filled = 0
        return at + (9 if flags & LONG else 2)

    def _fill(self, data: memoryview, at: int) -> int:
        assert self._frame is not None
        n = min(len(self._frame) - self._filled, len(data) - at)
        if n:
            self._frame[self._filled : self._filled + n] = data[at : at + n]
        self._filled += n
        self.pending_bytes += n
        return at + n

    def _end_frame(self, whole: list[list[memoryview]]) -> list[list[memoryview]]:
        """Handle the frame once it is complete: a command, or part of a message."""
        frame = self._frame
        if frame is None or self._filled < len(frame):
            return whole
        self._frame = None
        if self._flags & COMMAND:
            self.pending_bytes -= len(frame)
            self._command(bytes(frame))
            return whole
        self._frames.append(frame)
        if not self._flags & MORE:
            whole.append(self._frames)
            self._frames, self.pending_bytes = [], 0
        return whole

    def _command(self, data: bytes) -> None:
        size = data[0] if data else 0
        name, body = data[1 : 1 + size], data[1 + size :]
        if not self.established:
            if name != b"READY":
                raise ProtocolError(f"its handshake ends with {name[:20]!r}")
            self.established = True
        elif name == b"PING":
            self.replies.append(command(b"PONG", body[2:18]))  # the ping's context, without its timeout
        elif name == b"ERROR":
            raise ProtocolError("it reports an error")
