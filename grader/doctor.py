"""What this machine can grade, what is missing, and how to get it."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import psutil

from grader import images
from grader.errors import GraderError
from grader.sandbox import open_sandbox
from grader.sandbox.base import Specification

_GIBIBYTE = 1 << 30
_NEEDED_MEMORY = 4 * _GIBIBYTE
_NEEDED_DISK = 10 * _GIBIBYTE


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at. `fix` is empty where it works."""

    what: str
    works: bool
    found: str
    fix: str = ""


def examine() -> tuple[Row, ...]:
    """Look at everything that grading needs. Never raises: what fails is a row."""
    engine = _docker()
    rows = [_git(), _torch(), _memory(), _disk(), _local(), engine]
    if engine.works:
        rows += [_image(name) for name in images.NAMES]
        rows.append(_sandbox())
    return (*rows, _gpu(), *_conclusions(rows))


def _row(what: str, look: Callable[[], str], fix: str) -> Row:
    try:
        return Row(what, True, look())
    except (GraderError, OSError, subprocess.SubprocessError, metadata.PackageNotFoundError) as error:
        return Row(what, False, " ".join(str(error).split())[:200], fix)


def _git() -> Row:
    return _row("git", lambda: _first_line(["git", "--version"]), "install git 2.30 or newer")


def _torch() -> Row:
    return _row("torch, for the judge", lambda: metadata.version("torch"), "make setup")


def _memory() -> Row:
    total = psutil.virtual_memory().total
    fix = "" if total >= _NEEDED_MEMORY else "use a machine with at least 4 GiB"
    return Row("memory", not fix, f"{total / _GIBIBYTE:.1f} GiB, {os.cpu_count()} cores, {platform.machine()}", fix)


def _disk() -> Row:
    free = shutil.disk_usage("/").free
    fix = "" if free >= _NEEDED_DISK else "free some: images take about 4 GiB"
    return Row("disk", not fix, f"{free / _GIBIBYTE:.1f} GiB free", fix)


def _local() -> Row:
    def look() -> str:
        with open_sandbox("local", Specification()) as sandbox:
            finished = sandbox.run(["true"], timeout_s=10)
        return f"works ({finished.ending}); does not isolate"

    return _row("local sandbox", look, "see that a temporary folder is writable")


def _docker() -> Row:
    return _row(
        "Docker engine",
        images.engine_version,
        "install and start it (Debian: apt-get install docker.io; then dockerd), and see that you may use its socket",
    )


def _image(name: images.Name) -> Row:
    return _row(f"image {name}", lambda: images.require(name), f"grader images build {name}")


def _sandbox() -> Row:
    def look() -> str:
        with open_sandbox("docker", Specification(image=images.require("cpp-run"))) as sandbox:
            finished = sandbox.run(["id", "-u"], timeout_s=20)
        return f"works, as user {finished.stdout.strip()}; isolates"

    return _row("Docker sandbox", look, "build the images first; then see the engine's log")


def _gpu() -> Row:
    if shutil.which("nvidia-smi") is None:
        return Row("GPU", False, "none", "CUDA items are not run here; use a runner with an NVIDIA GPU")
    return _row("GPU", lambda: _first_line(["nvidia-smi", "--list-gpus"]), "see that the driver works: nvidia-smi")


def _conclusions(rows: list[Row]) -> list[Row]:
    works = {row.what: row.works for row in rows}
    torch = works["git"] and works["torch, for the judge"]
    cpp = torch and all(works.get(f"image {name}", False) for name in ("cpp", "cpp-run"))
    return [
        Row("=> your own code (check, --runner local)", torch and works["local sandbox"], ""),
        Row("=> students' Python submissions", torch and works.get("image torch", False), ""),
        Row("=> students' C++ submissions", cpp, ""),
    ]


def _first_line(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.splitlines()[0].strip()
