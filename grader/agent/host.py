"""The agent's end of the conversation with the host."""

from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from typing import Any

from grader import wire
from grader.agent import streams
from grader.errors import WireError


@dataclass(frozen=True, slots=True)
class Host:
    """Where requests come from, and where answers go.

    Attributes:
        stream: Unbuffered, so that a payload can be moved on by its descriptor.
        target: A blocking descriptor.
    """

    stream: FileIO
    target: int

    @property
    def source(self) -> int:
        """The descriptor on which requests come, and whose hang-up means that nobody waits any more."""
        return self.stream.fileno()

    def next_request(self) -> tuple[dict[str, Any], int] | None:
        """Return the next request's header and its payload's length, or None where the host is done."""
        return wire.read_header(self.stream)

    def next_inputs(self, rank: int) -> int:
        """Return the length of the inputs of `rank`, which stand next in the stream.

        Raises:
            EOFError: The host is gone.
            WireError: Something else stands there.
        """
        announced = self.next_request()
        if announced is None:
            raise EOFError
        header, size = announced
        if header.get("kind") != "rank_inputs" or header.get("rank") != rank:
            raise WireError(f"expected the inputs of rank {rank}, got {header}")
        return size

    def answer(self, header: Mapping[str, Any], payload_bytes: int = 0) -> None:
        """Send a frame up to its payload."""
        streams.write_all(self.target, wire.encode_header(header, payload_bytes))
