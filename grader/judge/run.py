"""Starts the judge, pytest in a process and an environment of its own, and reads its results as they come."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import grader
from grader.assignment.manifest import load
from grader.errors import InfrastructureError
from grader.judge.context import CheckResult, Context, planned
from grader.judge.failure import sanitise
from grader.judge.results import read_results, settle

Progress = Callable[[CheckResult, int, int], None]
"""Called with each result, how many have come, and how many will."""

CHECKS_PER_WORKER = 8
"""Another worker costs two imports of torch, its own and its sandbox's: as much as some checks together."""

_ROOT = Path(grader.__file__).parent.parent
_PASSED_ON = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "XDG_RUNTIME_DIR", "CUDA_VISIBLE_DEVICES")
_PASSED_ON_PREFIXES = ("DOCKER_", "GRADER_")
_USABLE_EXITS = frozenset({pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED})
_POLL_S = 0.05
_START_S = 180.0  # importing torch here and in the sandbox, on a busy machine
_GRACE_S = 20.0  # for sandboxes to be removed before the judge is killed
_LOG_TAIL = 3_000


def run(
    context: Context,
    progress: Progress | None = None,
    *,
    workers: int = 1,
    checks_per_worker: int = CHECKS_PER_WORKER,
    timeout_s: float | None = None,
) -> list[CheckResult]:
    """Judge, and return one result for every planned check, in the manifest's order.

    Args:
        context: What to judge. `results_path` is emptied first; the judge's own log goes to `judge.log` beside it.
        progress: Called as results come, in the order in which checks end.
        workers: At most so many processes judge side by side, each with a sandbox of its own.
        checks_per_worker: Fewer checks than this are not worth another worker.
        timeout_s: Wall time of all; derived from the number of checks and the case's limit where left out. Checks that
            have no result by then are infrastructure errors: each has its own, smaller limit.

    Raises:
        InfrastructureError: The judge broke, or its tests and the manifest disagree.
    """
    manifest = load(context.assignment_dir)
    plan = planned(context, manifest)
    if not plan:
        return []
    context.results_path.unlink(missing_ok=True)
    limit = timeout_s if timeout_s is not None else _START_S + len(plan) * 3 * manifest.limits.case_s
    useful = max(1, min(workers, len(plan) // checks_per_worker))
    lost = _judge(context, useful, limit, _Reader(context.results_path, len(plan), progress))
    return list(settle(context, manifest, read_results(context.results_path), lost))


def _judge(context: Context, workers: int, limit_s: float, reader: "_Reader") -> str:
    """Run the judge's process to its end, and return why a result may be missing."""
    log_path = context.results_path.parent / "judge.log"
    with tempfile.TemporaryDirectory(prefix="grader-judge-") as scratch, log_path.open("wb") as log:
        context_path = Path(scratch) / "context.json"
        context.write(context_path)
        argv = _command(context, context_path, workers)
        process = subprocess.Popen(
            argv,
            cwd=scratch,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        with _ended(process):
            timed_out = not _watch(process, time.monotonic() + limit_s, reader)
    reader.poll()
    if timed_out:
        return f"the judging was ended after {limit_s:g} s, before this check had a result"
    if process.returncode not in _USABLE_EXITS:
        raise InfrastructureError(
            f"the judge of {context.assignment_dir.name!r} broke (exit code {process.returncode}): {_tail(log_path)}",
            f"grade again; where it happens again, read {log_path}",
        )
    return "the judge has no result of this check: its process died, or no test makes the check"


def _command(context: Context, context_path: Path, workers: int) -> Sequence[str]:
    tests = context.assignment_dir / "tests"
    argv = [sys.executable, "-P", "-s", "-B", "-m", "pytest", "-p", "grader.judge.plugin", "-p", "no:cacheprovider"]
    argv += [
        "--grader-context",
        str(context_path),
        "-c",
        os.devnull,
        "--rootdir",
        str(tests),
        "--confcutdir",
        str(tests),
    ]
    argv += ["--import-mode=importlib", "--strict-markers", "-q", "-ra"]
    if workers > 1:
        argv += ["-p", "xdist", "-n", str(workers)]
    return [*argv, str(tests)]


def _environment() -> dict[str, str]:
    """Return the judge's environment: what it needs of ours, and nothing that could change what pytest does."""
    kept = {name: value for name, value in os.environ.items() if name in _PASSED_ON}
    kept |= {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON_PREFIXES)}
    return kept | {
        "PYTHONPATH": str(_ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",  # the workers and the ranks share the machine; the judge's own models are small
    }


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """See to it that on leaving nothing of the judge runs any more, and that its sandboxes had time to go."""
    try:
        yield
    finally:
        for sent, patience_s in ((signal.SIGINT, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            if process.poll() is not None:
                break
            os.killpg(process.pid, sent)
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue


def _watch(process: "subprocess.Popen[bytes]", deadline: float, reader: "_Reader") -> bool:
    """Return whether the process ended by itself before the deadline."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        reader.poll()
        time.sleep(_POLL_S)
    return True


class _Reader:
    """Reads the results file as it grows."""

    def __init__(self, path: Path, planned_checks: int, progress: Progress | None) -> None:
        self._path = path
        self._planned = planned_checks
        self._progress = progress
        self._seen = 0
        self._size = 0

    def poll(self) -> None:
        """Report what is new."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if self._progress is None or size == self._size:
            return
        self._size = size
        results = read_results(self._path)
        for result in results[self._seen :]:
            self._seen += 1
            self._progress(result, self._seen, self._planned)


def _tail(log_path: Path) -> str:
    text = log_path.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")
    return sanitise(text.strip(), _LOG_TAIL)
