"""Starts the judge, pytest in a process and an environment of its own, and reads its results as they come."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
_USABLE_EXITS = frozenset({0, 1})  # of pytest: all passed, some failed
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
    """Start a judge, judge, and return one result for every planned check, in the manifest's order.

    Args:
        context: What to judge.
        progress: Called as results come, in the order in which checks end.
        workers: At most so many processes judge side by side, each with a sandbox of its own.
        checks_per_worker: Fewer checks than this are not worth another worker.
        timeout_s: See `Judge.run`.

    Raises:
        InfrastructureError: The judge broke, or its tests and the manifest disagree.
    """
    plan = planned(context, load(context.assignment_dir))
    useful = max(1, min(workers, len(plan) // checks_per_worker))
    with started(context.assignment_dir, useful) as judge:
        return judge.run(context, progress, timeout_s=timeout_s)


@contextmanager
def started(assignment_dir: Path, workers: int = 1) -> "Iterator[Judge]":
    """Start a judge before there is anything to judge, so that it imports torch while a submission is built.

    Args:
        assignment_dir: The assignment's folder.
        workers: So many processes judge side by side, each with a sandbox of its own.
    """
    with tempfile.TemporaryDirectory(prefix="grader-judge-") as scratch:
        context_path, log_path = Path(scratch) / "context.json", Path(scratch) / "judge.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                _command(assignment_dir, context_path, workers),
                cwd=scratch,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            with _ended(process):
                yield Judge(process, context_path, log_path)


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge's process that waits for something to judge, once."""

    _process: "subprocess.Popen[bytes]"
    _context_path: Path
    _log_path: Path

    def run(
        self, context: Context, progress: Progress | None = None, *, timeout_s: float | None = None
    ) -> list[CheckResult]:
        """Judge, and return one result for every planned check, in the manifest's order.

        Args:
            context: What to judge. `results_path` is emptied first; the judge's own log goes to `judge.log` beside it.
            progress: Called as results come, in the order in which checks end.
            timeout_s: Wall time of all; derived from the number of checks and the case's limit where left out. Checks
                that have no result by then are infrastructure errors: each has its own, smaller limit.

        Raises:
            InfrastructureError: The judge broke, or its tests and the manifest disagree.
        """
        manifest = load(context.assignment_dir)
        plan = planned(context, manifest)
        if not plan:
            return []
        context.results_path.unlink(missing_ok=True)
        limit = timeout_s if timeout_s is not None else _START_S + len(plan) * 3 * manifest.limits.case_s
        lost = self._judge(context, limit, _Reader(context.results_path, len(plan), progress))
        return list(settle(context, manifest, read_results(context.results_path), lost))

    def _judge(self, context: Context, limit_s: float, reader: "_Reader") -> str:
        """Let the process judge to its end, and return why a result may be missing."""
        unseen = self._context_path.with_suffix(".part")
        context.write(unseen)
        unseen.replace(self._context_path)
        timed_out = not _watch(self._process, time.monotonic() + limit_s, reader)
        if timed_out:
            _end(self._process)
        reader.poll()
        shutil.copyfile(self._log_path, context.results_path.parent / "judge.log")
        if timed_out:
            return f"the judging was ended after {limit_s:g} s, before this check had a result"
        if self._process.returncode not in _USABLE_EXITS:
            code, name = self._process.returncode, context.assignment_dir.name
            raise InfrastructureError(
                f"the judge of {name!r} broke (exit code {code}): {_tail(self._log_path)}",
                "grade again; where it happens again, read judge.log",
            )
        return "the judge has no result of this check: its process died, or no test makes the check"


def _command(assignment_dir: Path, context_path: Path, workers: int) -> Sequence[str]:
    tests = assignment_dir / "tests"
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
    argv += ["--import-mode=importlib", "--strict-markers", "-q", "-ra", "--assert=plain", "--tb=native"]
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
    """See to it that on leaving nothing of the judge runs any more."""
    try:
        yield
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the judge, with time for its sandboxes to go."""
    for sent, patience_s in ((signal.SIGINT, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        if process.poll() is not None:
            break
        os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)


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
