"""A cold grade against the plain way, in turn, on the same commit and in the same image: `make bench-grade URL=...`.

The plain way is what a person would do: cmake, make -j, ctest, on the same tree with the same stand-ins for
third-party code. What is in the image is given to both; neither has a cache from any commit.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from grader import grade, images
from grader.assignment import manifest as manifests
from grader.intake import url, workspace
from grader.intake.repository import Mirrors
from grader.job import Request
from grader.sandbox import open_sandbox
from grader.sandbox.base import MEBIBYTE, Limits, Specification
from grader.settings import Settings

ASSIGNMENT = "tinyinfinitrain"
LIMIT = 0.4
_PLAIN = """set -e
ln -sfn /opt/third_party src/third_party
cmake -S src -B build -DBUILD_TEST=ON -DBUILD_TESTING=OFF -DUSE_CUDA=OFF
make -C build -k -j {jobs} || true
cd build && ctest --timeout 60 || true
"""


class _Silent:
    def phase(self, name: str) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""


def cold_grade(link: str, scratch: Path) -> tuple[float, dict[str, float]]:
    """Grade with empty caches; return seconds of wall time, and by phase."""
    settings = Settings(cache=scratch)
    began = time.monotonic()
    request = Request(link=link, assignment=ASSIGNMENT, fresh=True)
    (grading,) = grade.grade(request, settings, _Silent())
    return time.monotonic() - began, grading.record.phases.model_dump()


def plain_way(link: str, scratch: Path) -> float:
    """Build and test as a person would; return seconds of wall time, fetching not counted."""
    settings = Settings()
    files = _tree(link, Mirrors(scratch / "mirrors", timeout_s=settings.git_timeout_s), settings)
    limits = Limits(scratch_bytes=4096 * MEBIBYTE, memory_bytes=8192 * MEBIBYTE)
    specification = Specification(image=images.require("cpp"), limits=limits, label="benchmark")
    began = time.monotonic()
    with open_sandbox("docker", specification) as sandbox:
        sandbox.put({f"src/{path}": content for path, content in files.items()})
        script = _PLAIN.format(jobs=os.cpu_count() or 2)
        finished = sandbox.run(["sh", "-c", script], timeout_s=1800)
    seconds = time.monotonic() - began
    if "tests passed" not in finished.stdout and "tests failed" not in finished.stdout:
        raise click.ClickException(
            f"the plain way came to no tests: {finished.stdout[-1000:]}{finished.stderr[-1000:]}"
        )
    return seconds


def _tree(link: str, mirrors: Mirrors, settings: Settings) -> dict[str, bytes]:
    """Return the student's tree with the original tests, as both sides build it."""
    manifest = manifests.load_all(settings.assignments)[ASSIGNMENT]
    assert manifest.origin is not None
    origin = mirrors.open(manifest.origin.repository)
    origin.update()
    parsed = url.parse(link, hosts=settings.hosts)
    url.require_commit(parsed, allow_local=False)
    mirror = mirrors.open(parsed.repository)
    mirror.update()
    originals = workspace.originals(manifest, origin, manifest.origin.commit)
    prepared = workspace.prepare(manifest, mirror, mirror.resolve(parsed.ref), originals, {})
    return dict(prepared.files)


@click.command()
@click.argument("link", metavar="URL")
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="How often, in turn.")
def main(link: str, rounds: int) -> None:
    """Measure both sides and print them; exit 1 where the ratio is over the limit."""
    ours: list[float] = []
    plain: list[float] = []
    phases: dict[str, float] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="grader-bench-") as scratch:
            seconds, phases = cold_grade(link, Path(scratch) / "cold")
            ours.append(seconds)
            plain.append(plain_way(link, Path(scratch) / "plain"))
    ratio = statistics.median(ours) / statistics.median(plain)
    table = Table("side", "seconds (median)", "all", title=f"cold grade of {link}")
    table.add_row("plain way: cmake, make, ctest", f"{statistics.median(plain):.1f}", _list(plain))
    table.add_row("grader: everything", f"{statistics.median(ours):.1f}", _list(ours))
    for name, spent in phases.items():
        table.add_row(f"  {name.removesuffix('_s')}", f"{spent:.1f}", "")
    Console().print(table)
    click.echo(f"ratio {ratio:.2f}, limit {LIMIT}: {'ok' if ratio <= LIMIT else 'over'}")
    sys.exit(0 if ratio <= LIMIT else 1)


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


if __name__ == "__main__":
    main()
