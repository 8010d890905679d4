"""A small sample repository with a student-like history: starter, half done, a bug, right.

It is made from the package's own files, so that no second copy of a solution is kept, and is the same byte for byte
whenever it is made from the same files: the commits' names too.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from grader.assignment.manifest import load_all
from grader.assignment.starter import blank, starter
from grader.errors import InfrastructureError

ASSIGNMENT = "data_parallel"
SOLUTION = "data_parallel/ddp.py"
_ROOT = Path(__file__).parents[2]
_SUM = "return comm.all_reduce(bucket.flat, self.group)"
_AVERAGE = f"bucket.flat.div_(self.group.size)  # the mean over the ranks\n        {_SUM}"
_FIRST_DAY = 1_790_000_000  # seconds; any fixed day does
_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Stage:
    """One commit of the sample.

    Attributes:
        name: What the student had done by then.
        commit: 40 hexadecimal digits.
        link: What to hand in; a repository on this machine is graded by `--runner local` alone.
    """

    name: str
    commit: str
    link: str


def make(
    folder: Path, *, reference: Path = _ROOT / "reference", assignments: Path = _ROOT / "assignments"
) -> tuple[Stage, ...]:
    """Make the repository in `folder`, which must not exist or be empty, and return its commits, oldest first.

    Raises:
        InfrastructureError: git is missing or refuses, or the reference has changed so that a stage cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _git(folder, "init", "--quiet", "--initial-branch=main")
    known = load_all(assignments)
    files = starter([known[ASSIGNMENT]], known.values(), reference, assignments)
    solution = (reference / SOLUTION).read_text(encoding="utf-8")
    contents = {
        "starter": files[f"parallel/{SOLUTION}"].decode("utf-8"),
        "half done": blank(solution, ["GradientReducer.no_sync"], SOLUTION),
        "a bug": _with_bug(solution),
        "right": solution,
    }
    _write(folder, files)
    return tuple(_commit(folder, day, name, text) for day, (name, text) in enumerate(contents.items()))


_MESSAGES = {
    "starter": "Start from the template",
    "half done": "Sum gradients in buckets; accumulation is still to do",
    "a bug": "Accumulate over microbatches, average over ranks",
    "right": "Do not average: the loss is already divided by the global count",
}


def _with_bug(solution: str) -> str:
    """Return the solution with its gradients averaged, though the loss is divided by the global count already."""
    if solution.count(_SUM) != 1:
        raise InfrastructureError(
            f"the sample's bug has no place in {SOLUTION}: it holds {_SUM!r} {solution.count(_SUM)} times, not once",
            "adapt assignments/data_parallel/sample.py to the reference",
        )
    return solution.replace(_SUM, _AVERAGE)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def _commit(folder: Path, day: int, name: str, text: str) -> Stage:
    (folder / "parallel" / SOLUTION).write_text(text, encoding="utf-8")
    _git(folder, "add", "--all", day=day)
    _git(folder, "commit", "--quiet", "--message", _MESSAGES[name], day=day)
    commit = _git(folder, "rev-parse", "HEAD").strip()
    return Stage(name, commit, f"file://{folder.resolve()}@{commit}")


def _git(folder: Path, *arguments: str, day: int = 0) -> str:
    """Run git with nobody's settings, at a fixed time."""
    date = f"{_FIRST_DAY + day * _DAY} +0800"
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_AUTHOR_NAME": "Sample Student",
        "GIT_AUTHOR_EMAIL": "student@example.org",
        "GIT_AUTHOR_DATE": date,
        "GIT_COMMITTER_NAME": "Sample Student",
        "GIT_COMMITTER_EMAIL": "student@example.org",
        "GIT_COMMITTER_DATE": date,
    }
    argv = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(argv, env=environment, capture_output=True, check=False)
    except OSError as error:
        raise InfrastructureError(f"git cannot be started: {error}", "install git") from error
    if done.returncode != 0:
        raise InfrastructureError(
            f"git {arguments[0]} failed in {folder}: {done.stderr.decode('utf-8', 'replace').strip()}",
            "make the sample in a new, empty folder",
        )
    return done.stdout.decode("utf-8")
