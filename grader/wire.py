"""Frames: what crosses the trust line, in both directions.

A frame is 4 bytes of magic, a header length and a payload length (little-endian unsigned 32 and 64 bit),
a JSON object as header, and the payload's bytes. Tensors travel as safetensors in the payload. Nothing is
ever unpickled, and every length is checked against a cap before a byte of it is read.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from grader.errors import WireError

MAGIC = b"TIG1"
_PREFIX = struct.Struct("<4sIQ")
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 256 << 20


class Reader(Protocol):
    """Where bytes come from."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; an empty result means the end of the stream."""
        ...


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: a JSON object and the bytes that belong to it."""

    header: dict[str, Any]
    payload: bytes = b""


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame.

    Raises:
        WireError: The header or the payload exceeds its cap.
    """
    return encode_header(frame.header, len(frame.payload)) + frame.payload


def encode_header(header: Mapping[str, Any], payload_bytes: int) -> bytes:
    """Return the bytes of a frame up to its payload, for a payload that is sent by other means.

    Raises:
        WireError: The header or the payload exceeds its cap.
    """
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    _check_lengths(len(text), payload_bytes, MAX_PAYLOAD_BYTES)
    return _PREFIX.pack(MAGIC, len(text), payload_bytes) + text


def read(stream: Reader, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> Frame | None:
    """Read the next frame, or return None where the stream ends between two frames.

    Raises:
        WireError: Wrong magic, a length over its cap, a truncated frame, or a header that is no JSON object.
    """
    announced = read_header(stream, max_payload_bytes)
    if announced is None:
        return None
    header, payload_bytes = announced
    return Frame(header, _read_exactly(stream, payload_bytes))


def read_header(stream: Reader, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> tuple[dict[str, Any], int] | None:
    """Read a frame's header and its payload's length, and leave the payload in the stream.

    With an unbuffered stream the payload can then be moved on without being read into this process.

    Raises:
        WireError: As `read`.
    """
    prefix = _read_exactly(stream, _PREFIX.size, allow_end=True)
    if not prefix:
        return None
    magic, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise WireError(f"a frame begins with {magic!r}, expected {MAGIC!r}")
    _check_lengths(header_bytes, payload_bytes, max_payload_bytes)
    return _parse_header(_read_exactly(stream, header_bytes)), payload_bytes


def _check_lengths(header_bytes: int, payload_bytes: int, max_payload_bytes: int) -> None:
    if header_bytes > MAX_HEADER_BYTES:
        raise WireError(f"a frame's header has {header_bytes} bytes, the cap is {MAX_HEADER_BYTES}")
    if payload_bytes > max_payload_bytes:
        raise WireError(f"a frame's payload has {payload_bytes} bytes, the cap is {max_payload_bytes}")


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame's header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise WireError(f"a frame's header is a JSON {type(header).__name__}, expected an object")
    return header


def _read_exactly(stream: Reader, size: int, *, allow_end: bool = False) -> bytes:
    parts: list[bytes] = []
    missing = size
    while missing:
        part = stream.read(missing)
        if not part:
            if allow_end and missing == size:
                return b""
            raise WireError(f"a frame ended {missing} bytes early, expected {size}")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
