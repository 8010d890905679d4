"""The folder that a grading leaves behind: record, reports and logs."""

from pathlib import Path

from grader.report import render
from grader.store import Grading, keep_earlier_result, record_bytes, write_folder


def leave(grading: Grading, out: Path | None) -> Path:
    """Write what `submit` leaves behind, and return the folder."""
    record = grading.record
    folder = out or default_folder(grading)
    if keep_earlier_result(folder, record):
        folder = folder.with_name(f"{folder.name}.{record.id}")
    reports = {
        "report.html": render(record, "html"),
        "report.md": render(record, "md"),
        "junit.xml": render(record, "junit"),
    }
    encoded = {name: text.encode() for name, text in reports.items()}
    write_folder(folder, {**grading.files, **encoded, "record.json": record_bytes(record)})
    return folder


def default_folder(grading: Grading) -> Path:
    """Return `runs/<student or repository>/<commit12>-<assignment>`, made of harmless characters only."""
    submission = grading.record.submission
    owner = submission.student or submission.repository.rstrip("/").rsplit("/", 2)[-2]
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in owner)[:80] or "unnamed"
    return Path("runs") / safe / f"{submission.commit[:12]}-{grading.record.assignment.id}"
