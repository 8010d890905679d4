"""Gradescope's `results.json`: one test an item, with the checks in its output."""

import json

from grader.record import Item, Record, RecordStatus
from grader.report.words import status_word, word


def render(record: Record, language: str) -> str:
    """Return the JSON text. A grading that our side broke carries no score, so that none is recorded."""
    document: dict[str, object] = {
        "output": _summary(record, language),
        "output_format": "text",
        "execution_time": round(record.duration_s),
        "stdout_visibility": "hidden",
        "visibility": "visible",
        "tests": [_test(item, language) for item in record.items],
    }
    if record.status is not RecordStatus.INFRA_ERROR:
        document["score"] = record.score
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def _summary(record: Record, language: str) -> str:
    lines = [f"{record.assignment.title}: {record.submission.repository} @ {record.submission.commit}"]
    if record.provisional:
        lines.append(f"{word('provisional', language)}: {record.provisional_reason}")
    return "\n".join(lines)


def _test(item: Item, language: str) -> dict[str, object]:
    lines = []
    for check in item.checks:
        lines.append(f"[{status_word(check.status, language)}] {check.title}")
        lines += [f"    {line}" for line in check.message.splitlines()]
        if check.hint:
            lines.append(f"    {word('hint', language)}: {check.hint}")
    return {
        "name": item.title,
        "number": item.id,
        "score": item.earned,
        "max_score": item.points,
        "status": "passed" if item.status == "passed" else "failed",
        "output": "\n".join(lines),
        "output_format": "text",
        "visibility": "visible",
    }
