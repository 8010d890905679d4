"""Runs a harness's functions on the ranks of a sandbox, and tells a student's failure from ours."""

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

from torch import Tensor

from grader import wire
from grader.errors import WireError
from grader.sandbox.base import Specification
from grader.tracks.agent import AgentClient, ProgramLimits, RankCase, RankReport, RanksFinished, SubmissionFailure
from grader.tracks.torch.tensors import TensorFormatError, pack, unpack

_LOG_TAIL = 2000
_MAX_TEXT = 2000
_MAX_FRAMES = 8
_STACKS = 20_000
_STUDENT_FRAME = re.compile(r'File "[^"\n]{0,300}/submission/([^"\n]{1,300})", line (\d{1,7}) in')


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank handed back. None of it is to be trusted before the judge has compared it.

    Attributes:
        tensors: By the names that the harness gave them.
        values: JSON values that the harness gave beside the tensors.
        metrics: `bytes_sent`, `seconds` and `base_bytes` (resident before the harness's function was called) by
            the rank's own account; `peak_bytes` (the most that was resident) and `wall_seconds` by the kernel's.
    """

    rank: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    metrics: Mapping[str, float]
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that a rank reported, read with care."""

    rank: int
    at: float
    type: str
    message: str
    frames: tuple[Mapping[str, Any], ...]
    out_of_memory: bool
    communication: str


@dataclass(slots=True)
class Session:
    """A sandbox whose agent runs the ranks of one case after the other. A context manager."""

    client: AgentClient
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    max_result_bytes: int = 64 << 20

    @classmethod
    def open(
        cls,
        kind: Literal["docker", "local"],
        specification: Specification,
        submission: Mapping[str, bytes],
        harness: bytes,
        python: str = "python3",
        *,
        limits: ProgramLimits | None = None,
    ) -> Self:
        """Make the sandbox. The agent imports torch while the caller goes on.

        Args:
            kind: Which kind of sandbox.
            specification: What the sandbox may use.
            submission: The student's files, `parallel/...`, and the given ones among them.
            harness: The assignment's `harness.py`.
            python: The interpreter, as the sandbox sees it.
            limits: What one rank may use.

        Raises:
            InfrastructureError: The sandbox or the agent failed.
        """
        files = {f"submission/{path}": data for path, data in submission.items()} | {"harness.py": harness}
        client = AgentClient.open(kind, specification, files, python, needs_torch=True)
        return cls(client, limits or ProgramLimits())

    def run(
        self,
        function: str,
        arguments: Mapping[str, Any],
        inputs: Sequence[Mapping[str, Tensor]],
        timeout_s: float,
    ) -> tuple[RankResult, ...]:
        """Call a harness's function on every rank, each with its own inputs.

        Args:
            function: The function's name in `harness.py`.
            arguments: JSON values, the same for every rank.
            inputs: One mapping a rank: its own shards and nobody else's. Their number is the world size.
            timeout_s: Wall time of the case.

        Raises:
            SubmissionFailure: A rank crashed, hung, ran out of memory, or handed back what cannot be read.
            InfrastructureError: The sandbox or the agent failed.
        """
        case = RankCase(
            function=function,
            arguments=arguments,
            world_size=len(inputs),
            timeout_s=timeout_s,
            limits=self.limits,
            max_result_bytes=self.max_result_bytes,
        )
        finished = self.client.run_ranks(case, [pack(tensors) for tensors in inputs])
        if finished.ending != "finished" or any(_reported(report) for report in finished.ranks):
            _raise_failure(finished, timeout_s)
        return tuple(_result(report, finished) for report in finished.ranks)

    def __enter__(self) -> Self:
        """Enter."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the sandbox."""
        self.client.close()


def _result(report: RankReport, finished: RanksFinished) -> RankResult:
    header, payload = _read_frame(report, finished)
    try:
        tensors = unpack(payload)
    except TensorFormatError as error:
        raise _failure("crashed", f"rank {report.rank} handed back a broken result: {error}", finished) from error
    values = header.get("values")
    return RankResult(
        rank=report.rank,
        tensors=tensors,
        values=values if isinstance(values, dict) else {},
        metrics={
            **_numbers(header.get("metrics")),
            "peak_bytes": float(report.peak_bytes),
            "wall_seconds": report.duration_s,
        },
        stdout=report.stdout,
        stderr=report.stderr,
    )


def _read_frame(report: RankReport, finished: RanksFinished) -> tuple[dict[str, Any], bytes]:
    stream = io.BytesIO(report.result)
    try:
        frame = wire.read(stream)
        json.dumps(frame.header if frame else None, allow_nan=False)
    except (WireError, ValueError) as error:
        raise _failure("crashed", f"rank {report.rank} handed back a broken result: {error}", finished) from error
    if frame is None:
        raise _failure("crashed", _ended_early(report), finished)
    if stream.read(1) or frame.header.get("status") != "ok":
        raise _failure("crashed", f"rank {report.rank} handed back a result that no harness writes", finished)
    return frame.header, frame.payload


def _raise_failure(finished: RanksFinished, timeout_s: float) -> NoReturn:
    """Say which rank failed, how, and what the others were waiting for."""
    waits = [f"rank {r.rank} waits {_clean(r.waiting_for)}" for r in finished.ranks if r.waiting_for]
    if finished.ending == "deadlock":
        ended = [f"rank {r.rank} has finished" for r in finished.ranks if r.ending == "exited"]
        raise _failure("timeout", "the ranks wait for each other for ever: " + ", ".join(waits + ended), finished)
    if finished.ending == "timeout":
        raise _timeout(finished, waits, timeout_s)
    if finished.ending == "result_too_large":
        large = ", ".join(f"rank {report.rank}" for report in finished.ranks if report.too_large)
        raise _failure("crashed", f"{large} handed back more than a result may have", finished)
    _raise_rank_failure(finished, waits)


def _timeout(finished: RanksFinished, waits: Sequence[str], timeout_s: float) -> SubmissionFailure:
    busy = [r for r in finished.ranks if r.ending == "ended" and not r.waiting_for]
    message = f"no result within {timeout_s:g} s"
    if busy:
        listed = ", ".join(f"rank {report.rank}{_where_it_hangs(report)}" for report in busy)
        message += f": {listed} did not finish and waited in no communication"
    return _failure("timeout", "; ".join([message, *waits]), finished)


def _where_it_hangs(report: RankReport) -> str:
    """Read the innermost frame in the student's files from the stacks that a hanging rank printed."""
    stacks = report.stderr[-_STACKS:].rpartition("Current thread 0x")[2]
    found = _STUDENT_FRAME.search(stacks)
    return f" (at {_clean(found[1])}:{found[2]})" if found else ""


def _raise_rank_failure(finished: RanksFinished, waits: Sequence[str]) -> NoReturn:
    failures = [failure for report in finished.ranks if (failure := _reported(report)) is not None]
    waits = list(waits) or [f"rank {f.rank} waited {f.communication}" for f in failures if f.communication]
    silent = [r for r in finished.ranks if r.ending != "ended" and not r.result]
    own = [failure.rank for failure in failures if not failure.communication]
    # A rank that ends without a word makes the communication of the others fail.
    if silent and finished.first_failure not in own:
        report = next((r for r in silent if r.rank == finished.first_failure), silent[0])
        raise _failure(_silent_status(report), "; ".join([_ended_early(report), *waits]), finished, report.rank)
    if not failures:
        report = finished.ranks[finished.first_failure or 0]
        raise _failure("crashed", f"rank {report.rank} handed back a broken result", finished, report.rank)
    # An error in a communication is most often the echo of another rank's end.
    first = min(failures, key=lambda failure: (bool(failure.communication), failure.at))
    status = "out_of_memory" if first.out_of_memory else "crashed"
    others = [wait for wait in waits if not wait.startswith(f"rank {first.rank} ")]
    raise _failure(status, "; ".join([_describe(first), *others]), finished, first.rank, first.frames)


def _describe(failure: _Failure) -> str:
    place = ""
    if failure.frames:
        last = failure.frames[-1]
        place = f" at {last['path']}:{last['line']}"
    during = f" while it waited {failure.communication}" if failure.communication else ""
    return f"rank {failure.rank} raised {failure.type}{place}{during}: {failure.message}"


def _reported(report: RankReport) -> _Failure | None:
    """Read the error that a rank reported, or return None where it reported none that can be read."""
    try:
        announced = wire.read_header(io.BytesIO(report.result))
        header = announced[0] if announced else {}
        if header.get("status") != "error":
            return None
        return _Failure(
            rank=report.rank,
            at=float(header["at"]),
            type=_clean(header["type"]),
            message=_clean(header["message"]),
            frames=tuple(_frame(item) for item in header["frames"][-_MAX_FRAMES:]),
            out_of_memory=header["out_of_memory"] is True,
            communication=_clean(header["communication"]),
        )
    except (WireError, KeyError, TypeError, ValueError, OverflowError):
        return None


def _frame(item: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: _clean(item[name]) for name in ("path", "function", "code")}
    return {**texts, "line": int(item["line"])}


def _ended_early(report: RankReport) -> str:
    if report.out_of_memory:
        return f"rank {report.rank} was killed because the memory of the sandbox was used up"
    if report.exit_code is not None and report.exit_code < 0:
        return f"rank {report.rank} was killed by signal {-report.exit_code} and handed back nothing"
    return f"rank {report.rank} ended early, with exit code {report.exit_code}, and handed back nothing"


def _silent_status(report: RankReport) -> str:
    return "out_of_memory" if report.out_of_memory else "crashed"


def _failure(
    status: str,
    message: str,
    finished: RanksFinished,
    rank: int | None = None,
    frames: Sequence[Mapping[str, Any]] = (),
) -> SubmissionFailure:
    details: dict[str, Any] = {
        "ending": finished.ending,
        "waiting": {str(r.rank): _clean(r.waiting_for) for r in finished.ranks if r.waiting_for},
    }
    if rank is not None:
        details |= {"rank": rank, "frames": list(frames), "stderr": finished.ranks[rank].stderr[-_LOG_TAIL:]}
    else:
        details["stderr"] = {str(r.rank): r.stderr[-_LOG_TAIL:] for r in finished.ranks if r.stderr}
    return SubmissionFailure(status, message, details)


def _numbers(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, dict):
        return {}
    return {
        _clean(name): float(value)
        for name, value in list(metrics.items())[:100]
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    }


def _clean(text: object) -> str:
    """Return foreign text cut, on one line, and free of what cannot be encoded."""
    cut = str(text)[:_MAX_TEXT].encode("utf-8", "replace").decode()
    return " ".join("".join(c if c.isprintable() else " " for c in cut).split())
