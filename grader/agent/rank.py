"""One rank, from the fork to its result. Runs in the child; student code is imported only at its end."""

import contextlib
import faulthandler
import importlib.util
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import safetensors.torch
import torch
import torch.distributed as dist

from grader import wire
from grader.agent import privileges, process, streams
from grader.agent.group import Recorder, install
from grader.agent.ranks import HANG_SIGNAL
from grader.agent.waiting import Slot, describe

_SHOWN_FRAMES = 8
_SHOWN_MESSAGE = 2000


@dataclass(slots=True)
class RankContext:
    """What a harness's function knows of the rank that it runs in.

    Attributes:
        group: The group of all ranks.
        values: JSON values that go out beside the tensors; a harness fills them in.
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup
    _recorder: Recorder
    values: dict[str, Any] = field(default_factory=dict)

    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent so far, collectives counted by their ring algorithm."""
        return self._recorder.bytes_sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a case does. `root` holds the harness and, below `submission/`, the student's files."""

    world_size: int
    harness: str
    function: str
    arguments: dict[str, Any]
    timeout_s: float
    root: str
    store: str

    @property
    def submission(self) -> str:
        """The folder of the student's files."""
        return f"{self.root}/submission"


def run(job: Job, rank: int, slot: Slot) -> NoReturn:
    """Be rank `rank`: read the inputs, join the group, call the harness, send one frame, and end at once."""
    _open_streams()
    recorder = Recorder(slot, job.submission)
    with open(process.INPUT, "rb") as pipe:
        inputs = safetensors.torch.load(pipe.read())
    context = _join(job, rank, recorder)
    os.close(process.SETUP)  # from here on, what goes wrong is the student's
    code = 1
    try:
        code, frame = _guarded(lambda: _call_harness(job, context, inputs), recorder, job)
        streams.write_all(process.RESULT, frame)
        os.close(process.RESULT)
        if code == 0:
            slot.write({"state": "finished"})
            while True:
                signal.pause()  # until the agent ends the case: a peer may still need this rank's connections
    finally:
        os._exit(code)  # nothing that student code has registered for the end of the process may run


def _open_streams() -> None:
    # The interpreter's own streams belong to the agent; these write to this rank's pipes.
    # They live as long as the process, so that no context manager closes them.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.register(HANG_SIGNAL, file=2, all_threads=True)


def _join(job: Job, rank: int, recorder: Recorder) -> RankContext:
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.world_size)})
    os.environ.update({"HOME": os.getcwd(), "TMPDIR": os.getcwd(), "GLOO_SOCKET_IFNAME": "lo"})
    install(recorder)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store, job.world_size),  # type: ignore[attr-defined]  # public, though not listed
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_s + 60),  # the agent's own limit comes first
    )
    whole = dist.group.WORLD
    assert whole is not None
    recorder.bytes_sent = 0
    return RankContext(rank, job.world_size, whole, recorder)


def _call_harness(job: Job, context: RankContext, inputs: Mapping[str, torch.Tensor]) -> bytes:
    sys.path.insert(0, job.submission)
    specification = importlib.util.spec_from_file_location("harness", f"{job.root}/{job.harness}")
    assert specification is not None
    assert specification.loader is not None
    harness = importlib.util.module_from_spec(specification)
    sys.modules["harness"] = harness
    specification.loader.exec_module(harness)
    base_bytes = _resident_bytes()
    function: Callable[..., object] = getattr(harness, job.function)
    started = time.perf_counter()
    tensors = function(context, dict(inputs), job.arguments)
    metrics = {
        "bytes_sent": context.bytes_sent(),
        "seconds": time.perf_counter() - started,
        "base_bytes": base_bytes,
    }
    header = {"status": "ok", "values": context.values, "metrics": metrics}
    return wire.encode(wire.Frame(header, safetensors.torch.save(_plain_tensors(tensors))))


def _resident_bytes() -> int:
    return int(privileges.read_file("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _plain_tensors(tensors: object) -> dict[str, torch.Tensor]:
    if not isinstance(tensors, dict):
        raise TypeError(f"expected a dict of tensors, got {type(tensors).__name__}")
    plain = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if type(tensor) not in {torch.Tensor, torch.nn.Parameter} or tensor.is_meta or tensor.is_sparse:
            raise TypeError(f"{name}: expected a plain dense tensor, got {type(tensor).__name__}")
        # Each in memory of its own: tensors that share memory cannot be sent.
        plain[str(name)] = tensor.detach().to("cpu", copy=True).contiguous()
    return plain


def _guarded(call: Callable[[], bytes], recorder: Recorder, job: Job) -> tuple[int, bytes]:
    stdout, stderr = sys.stdout, sys.stderr
    try:
        code, frame = 0, call()
    except BaseException as error:  # noqa: BLE001 - the edge of the rank: whatever student code raises is its result
        code, frame = 1, wire.encode(wire.Frame(_error_header(error, recorder, job)))
        with contextlib.suppress(OSError, ValueError):
            stderr.write(_trimmed_traceback(error, job))
    with contextlib.suppress(OSError, ValueError):  # the student may have closed them
        stdout.flush()
        stderr.flush()
    return code, frame


def _error_header(error: BaseException, recorder: Recorder, job: Job) -> dict[str, Any]:
    header: dict[str, Any] = {
        "status": "error",
        "at": time.monotonic(),
        "type": type(error).__name__[:200],
        "message": _message(error),
        "frames": _student_frames(error, job),
        "out_of_memory": isinstance(error, MemoryError) or "can't allocate memory" in _message(error),
        "communication": "",
    }
    if recorder.failed is not None and _caused_by(error, recorder.failed[0]):
        header["communication"] = describe({**recorder.failed[1], "state": "waiting"})
    return header


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_SHOWN_MESSAGE]
    except BaseException:  # noqa: BLE001 - student code may define how its error is printed
        return ""


def _trimmed_traceback(error: BaseException, job: Job) -> str:
    """Return the traceback as it would look if the student's files were all there is, in the student's paths."""
    whole = traceback.TracebackException.from_exception(error)
    pending = [whole]
    while pending:
        one = pending.pop()
        kept = [frame for frame in one.stack if frame.filename.startswith(job.submission + "/")]
        one.stack = traceback.StackSummary.from_list(kept)
        pending += [other for other in (one.__cause__, one.__context__) if other is not None]
    return "".join(whole.format()).replace(job.submission + "/", "")


def _caused_by(error: BaseException, root: BaseException) -> bool:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if current is root:
            return True
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return False


def _student_frames(error: BaseException, job: Job) -> list[dict[str, Any]]:
    """Return the innermost frames that lie in the student's files, with paths as in their repository."""
    frames = [
        {
            "path": os.path.relpath(frame.filename, job.submission),
            "line": frame.lineno,
            "function": frame.name[:200],
            "code": (frame.line or "")[:200],
        }
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(job.submission + "/")
    ]
    if isinstance(error, SyntaxError) and (error.filename or "").startswith(job.submission + "/"):
        path = os.path.relpath(str(error.filename), job.submission)
        frames.append({"path": path, "line": error.lineno, "function": "", "code": (error.text or "").strip()[:200]})
    return frames[-_SHOWN_FRAMES:]
