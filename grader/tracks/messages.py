"""What the host asks of the agent, and what it makes of the answers, none of which it takes on trust."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from grader import wire
from grader.errors import InfrastructureError
from grader.sandbox.base import MEBIBYTE

_Answer = TypeVar("_Answer")
_SIZES = ("result_bytes", "stdout_bytes", "stderr_bytes")  # the payload holds all of the first, then of the next


class SubmissionFailure(Exception):  # noqa: N818 - a verdict on the submission, not an error of ours
    """The student's code failed.

    Args:
        status: `crashed`, `timeout`, `out_of_memory` or `failed`, as in a record.
        message: What happened, naming the rank or the program.
        details: Structured facts: ranks, what they waited for, frames in the student's files, the end of the log.
    """

    def __init__(self, status: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.details = dict(details or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """What one program or one rank may use; `memory_bytes` is private memory beyond what it starts with."""

    memory_bytes: int = 4096 * MEBIBYTE
    processes: int = 48
    file_bytes: int = 512 * MEBIBYTE
    open_files: int = 512
    log_bytes: int = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program to run in a private folder of its own.

    Attributes:
        argv: `{case}` stands for the private folder, here and in `cwd` and the environment's values.
        cwd: Where it starts; absolute, or relative to the private folder.
        user: Programs of different numbers run as different users where the sandbox can do that.
        inputs: Files written into the private folder, by plain name.
        outputs: Files read back from it, by plain name, where they are regular files.
        max_output_bytes: Of all outputs together.
    """

    argv: Sequence[str]
    timeout_s: float
    cwd: str = "{case}"
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    user: int = 0
    inputs: Mapping[str, bytes] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    max_output_bytes: int = 64 * MEBIBYTE

    def header(self) -> dict[str, Any]:
        """Return the request's header; the inputs' bytes follow as its payload."""
        return {
            "kind": "run_command",
            "argv": list(self.argv),
            "timeout_s": self.timeout_s,
            "cwd": self.cwd,
            "environment": dict(self.environment),
            "limits": asdict(self.limits),
            "user": self.user,
            "inputs": [[name, len(data)] for name, data in self.inputs.items()],
            "outputs": list(self.outputs),
            "max_output_bytes": self.max_output_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFinished:
    """How a program ended, and what it left.

    Attributes:
        ending: `exited`, `killed` (by a signal that nobody here sent) or `timeout`.
        exit_code: Its own, or minus the signal's number, or None on a timeout.
        peak_bytes: The most memory that was resident at once.
        out_of_memory: The kernel killed it because the sandbox's memory was used up.
        outputs: Those that were there, by name.
        refused: Those that were no regular files, or too large, with the reason.
    """

    ending: Literal["exited", "killed", "timeout"]
    exit_code: int | None
    duration_s: float
    stdout: str
    stderr: str
    truncated: bool
    peak_bytes: int
    out_of_memory: bool
    outputs: Mapping[str, bytes]
    refused: Mapping[str, str]

    @classmethod
    def parse(cls, answer: wire.Frame) -> "CommandFinished":
        """Read an answer.

        Raises:
            InfrastructureError: It is not what an agent says.
        """
        return _read(lambda: cls._parse(answer))

    @classmethod
    def _parse(cls, answer: wire.Frame) -> "CommandFinished":
        header = answer.header
        names = [str(name) for name, _ in header["outputs"]]
        sizes = [int(size) for _, size in header["outputs"]] + [int(size) for size in header["log_sizes"]]
        *outputs, stdout, stderr = _split(answer.payload, sizes)
        return cls(
            ending=header["ending"],
            exit_code=header["exit_code"],
            duration_s=float(header["duration_s"]),
            stdout=_text(stdout),
            stderr=_text(stderr),
            truncated=bool(header["truncated"]),
            peak_bytes=int(header["peak_bytes"]),
            out_of_memory=bool(header["out_of_memory"]),
            outputs=dict(zip(names, outputs, strict=True)),
            refused={str(name): str(reason) for name, reason in header["refused"]},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCase:
    """One call of a harness's function on every rank. `harness` is a path below the sandbox's root."""

    function: str
    world_size: int
    timeout_s: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    harness: str = "harness.py"
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    max_result_bytes: int = 64 * MEBIBYTE

    def header(self) -> dict[str, Any]:
        """Return the request's header. All results together must fit into one frame."""
        together = wire.MAX_PAYLOAD_BYTES - 2 * self.world_size * (self.limits.log_bytes + 256)
        most = min(self.max_result_bytes, together // self.world_size)
        return {"kind": "run_ranks", **asdict(self), "max_result_bytes": most}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """How one rank ended.

    Attributes:
        ending: `exited`, `killed` (by a signal that nobody here sent), or `ended` with the case by the agent.
        out_of_memory: The kernel killed it because the sandbox's memory was used up.
        waiting_for: What it waited for when the case stood still or another rank failed, or an empty string.
        result: Its frame's bytes, unread.
    """

    rank: int
    ending: Literal["exited", "killed", "ended"]
    exit_code: int | None
    duration_s: float
    stdout: str
    stderr: str
    truncated: bool
    peak_bytes: int
    waiting_for: str
    too_large: bool
    out_of_memory: bool
    result: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksFinished:
    """How a case ended.

    Attributes:
        ending: `finished`, `failed`, `deadlock`, `timeout` or `result_too_large`.
        first_failure: The rank that failed first, where one did.
    """

    ending: Literal["finished", "failed", "deadlock", "timeout", "result_too_large"]
    first_failure: int | None
    ranks: tuple[RankReport, ...]

    @classmethod
    def parse(cls, answer: wire.Frame) -> "RanksFinished":
        """Read an answer.

        Raises:
            InfrastructureError: It is not what an agent says.
        """
        return _read(lambda: cls._parse(answer))

    @classmethod
    def _parse(cls, answer: wire.Frame) -> "RanksFinished":
        header = answer.header
        listed = [dict(report) for report in header["ranks"]]
        sizes = [[int(report.pop(name)) for report in listed] for name in _SIZES]
        parts = _split(answer.payload, [size for column in sizes for size in column])
        columns = [parts[start : start + len(listed)] for start in range(0, len(parts), len(listed))]
        reports = [
            RankReport(**report, result=result, stdout=_text(stdout), stderr=_text(stderr))
            for report, result, stdout, stderr in zip(listed, *columns, strict=True)
        ]
        return cls(ending=header["ending"], first_failure=header["first_failure"], ranks=tuple(reports))


def _read(parse: Callable[[], _Answer]) -> _Answer:
    """Parse what the agent said.

    Raises:
        InfrastructureError: It is not what an agent says.
    """
    try:
        return parse()
    except (KeyError, TypeError, ValueError) as error:
        raise InfrastructureError(f"the agent's answer makes no sense: {error!r}", "grade again") from error


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _split(payload: bytes, sizes: Sequence[int]) -> list[bytes]:
    ends = list(itertools.accumulate(sizes))
    if any(size < 0 for size in sizes) or (ends[-1] if ends else 0) != len(payload):
        raise ValueError(f"the sizes {list(sizes)} do not add up to the payload's {len(payload)} bytes")
    return [payload[end - size : end] for end, size in zip(ends, sizes, strict=True)]
