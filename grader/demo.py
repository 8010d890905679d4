"""Grades a sample repository with a student-like history through the whole path: `make demo`."""

import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from assignments.data_parallel import sample
from grader import grade
from grader.job import Request
from grader.outcome import leave
from grader.report.words import number
from grader.settings import Settings

OUT = Path("runs") / "sample"


class _Silent:
    """The demo prints one line a commit; what a person sees of one grading is `grader submit`'s to show."""

    def phase(self, name: str) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""


def main() -> None:
    """Make the repository, grade each commit with the local runner, and say where the reports are."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="grader-sample-") as scratch:
        settings = Settings(cache=Path(scratch) / "cache")
        table = Table("commit", "score", "report", title="a student's history, graded")
        for stage in sample.make(Path(scratch) / "student"):
            console.print(Text(f"grading {stage.commit[:12]}: {stage.name}"))
            request = Request(link=stage.link, assignment=sample.ASSIGNMENT, runner="local", fresh=True)
            (grading,) = grade.grade(request, settings, _Silent())
            folder = leave(grading, OUT / stage.name.replace(" ", "-"))
            score = f"{number(grading.record.score)} / {number(grading.record.available)}"
            table.add_row(f"{stage.commit[:12]} {stage.name}", score, str(folder / "report.html"))
    console.print(table)


if __name__ == "__main__":
    main()
