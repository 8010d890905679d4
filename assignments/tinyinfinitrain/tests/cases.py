"""Cases of a probe: what goes in by name, what came out of each, and what to say where one did not come to its end.

A probe runs each of its cases in a process of its own; see `probes/cases.h`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from assignments.tinyinfinitrain.tests import tasks
from assignments.tinyinfinitrain.tests.tasks import Task
from grader.judge.failure import CheckFailure
from grader.tracks.agent import SubmissionFailure

_ALARM = -14
_LOG_CHARACTERS = 1_500
_LOG_PREFIX = re.compile(r"^[IWEF]\d{8} [\d:.]+\s+\d+\s+")
_FRAMES_OR_PREFIXES = re.compile(r"^(\s*@\s|\*\*\*|WARNING: Logging before)")
_TELLING = ("check failed", "what():", "uncaught exception")
_MISSING_KERNEL = "kernel not found"

Device = str  # `cpu` or `cuda`
Verdict = CheckFailure | SubmissionFailure


class Submission(Protocol):
    """The judge's fixture, as far as probes need it."""

    def probe(
        self, name: str, inputs: Mapping[str, Tensor | bytes], arguments: Mapping[str, str | int]
    ) -> dict[str, Tensor]:
        """Run `probe_<name>` and return its outputs; raises `SubmissionFailure`."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one case left behind.

    Attributes:
        status: 0 where it came to its end; minus the signal or the exit code where not.
        tensors: Its outputs by name, those too that it kept before a crash.
        printed, log: The last bytes of its standard output and error.
    """

    case: str
    status: int
    tensors: Mapping[str, Tensor]
    printed: bytes
    log: str

    def get(self, name: str) -> Tensor | None:
        """Return an output, or None where it did not come back."""
        return self.tensors.get(name)

    def number(self, name: str) -> int | None:
        """Return an output of one whole number, or None where it is no such thing."""
        return _whole(self.tensors.get(name))

    @property
    def reason(self) -> str:
        """The line of the log that says why it ended: what a failed CHECK printed, not the stack below it."""
        lines = [line for line in self.log.splitlines() if line.strip() and not _FRAMES_OR_PREFIXES.match(line)]
        told = [line for line in lines if any(sign in line.lower() for sign in _TELLING)]
        return _LOG_PREFIX.sub("", (told or lines or [""])[0]).strip()


def run(
    submission: Submission,
    program: str,
    probe: str,
    cases: Mapping[str, Mapping[str, Tensor]],
    *,
    device: Device = "cpu",
    files: Mapping[str, bytes] | None = None,
    arguments: Mapping[str, str | int] | None = None,
) -> dict[str, Outcome]:
    """Run all cases of one probe and return what each of them left.

    Raises:
        SubmissionFailure: The program did not start or did not come to its end at all.
    """
    inputs: dict[str, Tensor | bytes] = dict(files or {})
    for case, tensors in cases.items():
        inputs |= {f"{case}/{name}": tensor for name, tensor in tensors.items()}
    told = {"probe": probe, "device": device, **(arguments or {})}
    outputs = submission.probe(program, inputs, told)
    return {case: _outcome(case, outputs) for case in cases}


def _outcome(case: str, outputs: Mapping[str, Tensor]) -> Outcome:
    own = {name.removeprefix(f"{case}/"): tensor for name, tensor in outputs.items() if name.startswith(f"{case}/")}
    status, printed, log = (own.pop(name, None) for name in ("status", "stdout", "stderr"))
    code = _whole(status)
    return Outcome(case, 1 if code is None else code, own, _bytes(printed), _bytes(log).decode("utf-8", "replace"))


def _whole(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.numel() != 1 or tensor.dtype != torch.int64 else int(tensor)


def _bytes(tensor: Tensor | None) -> bytes:
    if tensor is None or tensor.dtype != torch.uint8:
        return b""
    return tensor.contiguous().numpy().tobytes()


def judge_each(
    submission: Submission,
    task: Task,
    outcomes: Mapping[str, Outcome],
    judge: Callable[[Outcome], None],
    *,
    device: Device = "cpu",
) -> None:
    """Judge every case; where some fail, report the first and name the others.

    Args:
        submission: Asked once more, for the registered kernels, where a kernel was missing.
        task: What the student was to fill in.
        outcomes: By case.
        judge: Raises a verdict on one case that came to its end.
        device: Where the cases ran.

    Raises:
        CheckFailure: A wrong answer, or a task that is not filled in.
        SubmissionFailure: A case that crashed or ran out of time.
    """
    failed = {case: verdict for case, outcome in outcomes.items() if (verdict := _verdict(outcome, judge))}
    if not failed:
        return
    explained = _explain_missing_kernels(submission, outcomes, device)
    first = explained or next(iter(failed.values()))
    passed = [case for case in outcomes if case not in failed]
    details = {"cases_failed": list(failed), "cases_passed": passed, **first.details}
    others = f" {len(failed)} of {len(outcomes)} cases fail: {', '.join(failed)}." if len(outcomes) > 1 else ""
    named = first.message if "unfilled" in first.details else _in_task(first.message, task)
    if explained and task is not tasks.DISPATCHER:
        named = f"{named} So this is not reached: {task}."
    message = f"{named}{others}"
    if isinstance(first, SubmissionFailure):
        raise SubmissionFailure(first.status, message, details)
    raise CheckFailure(message, details, first.hint)


def _in_task(message: str, task: Task) -> str:
    end = "" if message.endswith((".", "!", "?")) else "."
    return f"{message}{end} The task: {task}."


def _verdict(outcome: Outcome, judge: Callable[[Outcome], None]) -> Verdict | None:
    try:
        if outcome.status != 0:
            raise crash(outcome)
        judge(outcome)
    except (CheckFailure, SubmissionFailure) as verdict:
        return verdict
    return None


def crash(outcome: Outcome) -> SubmissionFailure:
    """Return the verdict on a case that did not come to its end."""
    details = {"case": outcome.case, "log": outcome.log[-_LOG_CHARACTERS:], "status": outcome.status}
    if outcome.status == _ALARM:
        return SubmissionFailure("timeout", f"case {outcome.case} did not end within its time", details)
    how = f"signal {-outcome.status}" if outcome.status < 0 else f"exit code {outcome.status}"
    kept = [name for name in outcome.tensors if "." not in name]
    after = f" after it had handed back {' and '.join(kept)}" if kept else ""
    said = f": {outcome.reason}" if outcome.reason else ""
    return SubmissionFailure("crashed", f"case {outcome.case} was ended by {how}{after}{said}", details)


def bytes_of(outcome: Outcome, name: str) -> bytes:
    """Return an output of bytes; none where it is no such thing."""
    return _bytes(outcome.get(name))


def require_filled_in(outcome: Outcome, task: Task, names: Sequence[str]) -> None:
    """Fail where the outputs are what the starter hands back: nothing, or a tensor that holds nothing.

    Raises:
        CheckFailure: Every one of `names` is missing or empty.
    """
    found = [outcome.get(name) for name in names]
    if all(tensor is None or tensor.numel() == 0 for tensor in found):
        raise unfilled(task, f"case {outcome.case} handed back no {' and no '.join(names)}")


def unfilled(task: Task, sign: str) -> CheckFailure:
    """Return the verdict on a task that still is as in the starter, and by what sign that is seen."""
    message = f"Not filled in: {task} ({sign})."
    return CheckFailure(message, {"unfilled": task.where}, f"Not filled in: {task}.")


def _explain_missing_kernels(
    submission: Submission, outcomes: Mapping[str, Outcome], device: Device
) -> CheckFailure | None:
    """Where a case asked for a kernel that is not registered, say which of the framework's are and which are not."""
    if not any(_MISSING_KERNEL in outcome.log.lower() for outcome in outcomes.values() if outcome.status):
        return None
    expected = {f"{device}:{name}": {"ask": torch.zeros(1)} for name in tasks.KERNELS}
    registered = run(submission, "dispatcher", "registered", expected)
    missing = [name.split(":")[1] for name, outcome in registered.items() if outcome.status]
    if len(missing) == len(expected):
        return unfilled(tasks.DISPATCHER, f"none of the framework's {len(expected)} kernels is registered for {device}")
    if not missing:
        return None
    message = f"Not registered for {device}: {', '.join(missing)}; the other {len(expected) - len(missing)} are."
    return CheckFailure(message, {"kernels_missing": missing, "device": device}, "A kernel is not registered.")
