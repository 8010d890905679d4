"""Bytes that programs send: kept up to a cap, and moved between pipes without passing through this process."""

import contextlib
import fcntl
import os
from dataclasses import dataclass, field
from typing import Protocol

CHUNK_BYTES = 1 << 16
_HIGH = 64  # descriptors below are laid out anew in every child


def high(descriptor: int) -> int:
    """Move a descriptor out of the range in which a child lays out its own; it closes on exec."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(descriptor)
    return moved


def pipe() -> tuple[int, int]:
    """Return the reading and the writing end of a new pipe."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    return high(reading), high(writing)


class Sink(Protocol):
    """Where what a program sends goes."""

    def take_from(self, descriptor: int) -> bool:
        """Take what is there now. False at the end of the stream, or where no more is wanted."""
        ...


@dataclass(slots=True)
class Log:
    """The beginning and the end of what a program printed, together at most `cap` bytes."""

    cap: int
    total: int = 0
    _head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)

    def take_from(self, descriptor: int) -> bool:
        """Take what is there now. False at the end of the stream."""
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return True
        self.add(data)
        return bool(data)

    def add(self, data: bytes) -> None:
        """Append bytes, dropping from the middle."""
        self.total += len(data)
        room = self.cap - self.cap // 2 - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self.cap:
            self._tail = self._tail[-(self.cap // 2) :]

    @property
    def truncated(self) -> bool:
        """Whether something was dropped."""
        return self.total > self.cap

    def kept(self) -> bytes:
        """Return what is kept; a line in the middle says how much was dropped."""
        if not self.truncated:
            return bytes(self._head + self._tail)
        tail = self._tail[len(self._tail) - self.cap // 2 :]
        mark = f"\n[... {self.total - len(self._head) - len(tail)} bytes left out ...]\n"
        return bytes(self._head + mark.encode() + tail)

    def text(self) -> str:
        """Return what is kept, decoded."""
        return self.kept().decode("utf-8", "replace")


@dataclass(slots=True)
class Store:
    """Up to `cap` bytes in a nameless file, so that none of them stays in this process's memory."""

    cap: int
    size: int = 0
    overflowed: bool = False
    descriptor: int = field(default_factory=lambda: high(os.memfd_create("store")))

    def take_from(self, descriptor: int) -> bool:
        """Take what is there now. False at the end of the stream, or over the cap."""
        try:
            moved = os.splice(descriptor, self.descriptor, CHUNK_BYTES, offset_dst=self.size)
        except BlockingIOError:
            return True
        self.size += moved
        self.overflowed = self.size > self.cap
        return moved > 0 and not self.overflowed

    def send_to(self, descriptor: int) -> None:
        """Write everything to a blocking descriptor."""
        sent = 0
        while sent < self.size:
            sent += os.sendfile(descriptor, self.descriptor, sent, self.size - sent)

    def close(self) -> None:
        """Drop what is kept."""
        os.close(self.descriptor)


def forward(source: int, target: int, size: int) -> None:
    """Move exactly `size` bytes into the pipe `target`; the rest is dropped where its reader is gone.

    Raises:
        EOFError: The source ended early.
    """
    while size:
        try:
            moved = os.splice(source, target, min(size, 1 << 20))
        except BrokenPipeError:
            break
        if not moved:
            raise EOFError
        size -= moved
    discard(source, size)


def discard(source: int, size: int) -> None:
    """Read and drop exactly `size` bytes.

    Raises:
        EOFError: The source ended early.
    """
    while size:
        data = os.read(source, min(size, CHUNK_BYTES))
        if not data:
            raise EOFError
        size -= len(data)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def close_quietly(descriptor: int) -> None:
    """Close a descriptor that may be closed already."""
    with contextlib.suppress(OSError):
        os.close(descriptor)
