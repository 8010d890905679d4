"""What every rank is waiting for: noted by the rank in memory it shares with the agent, read by the agent.

A rank can write whatever it likes there. What is noted therefore only explains, and ends a case early in which
by the kernel's own account nothing runs any more; it never decides a verdict.
"""

import contextlib
import json
import mmap
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grader.agent import privileges

_SLOT_BYTES = 4096
_HEAD = struct.Struct("<QI")
_QUIET_S = 0.8
_QUIET_SAMPLES = 8
_QUIET_TICKS = 4  # of 10 ms of processor time: polling a file store costs a little
_SHOWN_RANKS = 16


class Slot:
    """One rank's note. The agent makes it before the fork; both sides see it, and nobody else does."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SLOT_BYTES)
        self._sequence = 0

    def write(self, note: Mapping[str, Any]) -> None:
        """Replace the note."""
        text = json.dumps(note).encode()[: _SLOT_BYTES - _HEAD.size]
        self._sequence += 1
        self._memory[: _HEAD.size] = _HEAD.pack(self._sequence, len(text))
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text

    def sequence(self) -> int:
        """Return how often the note has changed."""
        return int(_HEAD.unpack(self._memory[: _HEAD.size])[0])

    def read(self) -> dict[str, Any]:
        """Return the note, or {} where there is none that makes sense."""
        _, size = _HEAD.unpack(self._memory[: _HEAD.size])
        with contextlib.suppress(ValueError, RecursionError):
            note = json.loads(self._memory[_HEAD.size : _HEAD.size + min(size, _SLOT_BYTES - _HEAD.size)])
            return note if isinstance(note, dict) else {}
        return {}

    def close(self) -> None:
        """Unmap it on this side."""
        self._memory.close()


def describe(note: Mapping[str, Any]) -> str:
    """Say what a rank waits for: `to receive from rank 0 (parallel/ring.py:12)`, or `` where it does not wait."""
    if note.get("state") != "waiting":
        return ""
    operation, where = str(note.get("operation", ""))[:40], str(note.get("where", ""))[:120]
    return _phrase(operation, note) + (f" ({where})" if where else "")


def _phrase(operation: str, note: Mapping[str, Any]) -> str:
    peer, ranks = note.get("peer"), _ranks(note.get("ranks"))
    match operation:
        case "send":
            return f"to send to rank {peer}"
        case "recv":
            return f"to receive from rank {peer}"
        case "recv_anysource":
            return "to receive from any rank"
        case "new_group":
            return f"for {ranks} to make a new group"
        case "broadcast" | "reduce" | "scatter" | "gather":
            return f"in the {operation} of {ranks} with root {peer}"
        case _:
            return f"in the {operation} of {ranks}"


def _ranks(listed: object) -> str:
    if not isinstance(listed, list):
        return "all ranks"
    shown = ", ".join(str(rank)[:8] for rank in listed[:_SHOWN_RANKS])
    return f"ranks {shown}" + (", ..." if len(listed) > _SHOWN_RANKS else "")


@dataclass(slots=True)
class Standstill:
    """Notices that all living ranks wait on each other, and that by the kernel's account nothing moves."""

    _since: float = 0.0
    _samples: int = 0
    _before: tuple[tuple[int, int], ...] = field(default=())
    _ticks: int = 0

    def seen(self, ranks: Sequence[tuple[int, Slot]]) -> bool:
        """Take a sample of the living ranks (process id and slot). True once they have stood still long enough."""
        notes = tuple((pid, slot.sequence()) for pid, slot in ranks)
        waiting = all(slot.read().get("state") == "waiting" for _, slot in ranks)
        ticks = sum(_processor_ticks(pid) for pid, _ in ranks) if waiting else 0
        moved = notes != self._before or ticks - self._ticks > _QUIET_TICKS
        if not waiting or moved or any(_runs(pid) for pid, _ in ranks):
            self._since, self._samples, self._before, self._ticks = time.monotonic(), 0, notes, ticks
            return False
        self._samples += 1
        return self._samples >= _QUIET_SAMPLES and time.monotonic() - self._since >= _QUIET_S


def _processor_ticks(pid: int) -> int:
    with contextlib.suppress(OSError):
        fields = privileges.stat_fields(f"/proc/{pid}/stat")
        return int(fields[11]) + int(fields[12])
    return 0


def _runs(pid: int) -> bool:
    """Whether any of its threads runs, or wants to (a busy machine lets it wait)."""
    with contextlib.suppress(OSError):
        return any(
            privileges.stat_fields(f"/proc/{pid}/task/{thread}/stat")[0] in "RD"
            for thread in privileges.threads_of(pid)
        )
    return True
