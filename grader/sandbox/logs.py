"""Keeps the first bytes of what a program prints, counts the rest, and makes text of them."""

import codecs
import threading
from typing import BinaryIO

_CHUNK = 1 << 16


class Log:
    """A capped text log, fed with bytes. What arrives over the cap is counted and dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._parts: list[str] = []
        self._room = max_bytes
        self._dropped = 0

    def feed(self, data: bytes) -> None:
        """Take bytes; invalid UTF-8 becomes replacement characters."""
        kept = data[: self._room]
        self._room -= len(kept)
        self._dropped += len(data) - len(kept)
        if kept:
            self._parts.append(self._decoder.decode(kept))

    @property
    def truncated(self) -> bool:
        """Whether anything was dropped."""
        return self._dropped > 0

    def text(self) -> str:
        """Return what was kept, with a last line that says how much was not."""
        text = "".join(self._parts)
        return f"{text}\n[{self._dropped} more bytes were dropped]\n" if self._dropped else text


def pump(stream: BinaryIO, log: Log) -> threading.Thread:
    """Feed a stream to a log until it ends, in a thread."""

    def run() -> None:
        with stream:
            while data := stream.read(_CHUNK):
                log.feed(data)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
