"""The engine's connections as byte streams."""

import contextlib
import io
import os
import socket
from typing import Any, BinaryIO


class SocketWriter(io.RawIOBase):
    """Writes to a connection; closing sends the end of the stream and leaves the other direction open."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def writable(self) -> bool:
        """Return that it is."""
        return True

    def write(self, data: Any, /) -> int:
        """Send what the connection takes now; return how many bytes that was."""
        return self._connection.send(data)

    def close(self) -> None:
        """Send the end of the stream."""
        if not self.closed:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)
        super().close()


class Capped:
    """Keeps the first bytes of a stream, and reads it to its end."""

    def __init__(self, max_bytes: int) -> None:
        self.data = b""
        self._room = max_bytes

    def read_from(self, stream: BinaryIO) -> None:
        """Read to the end of the stream."""
        parts = []
        while data := stream.read(1 << 16):
            parts.append(data[: self._room])
            self._room -= len(parts[-1])
        self.data = b"".join(parts)


def raw(connection: Any) -> socket.socket:
    """Return a socket of our own without a timeout, whatever the SDK wrapped around it."""
    copied = socket.socket(fileno=os.dup(connection.fileno()))
    copied.settimeout(None)
    connection.close()
    return copied


def feed(stream: BinaryIO, data: bytes) -> None:
    """Write everything and close; a reader that is gone is no error."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(data)
        stream.close()


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything to a descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
