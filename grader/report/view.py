"""Who may see what."""

from typing import Literal

from grader.record import Check, Record

View = Literal["student", "staff"]

# Of these artifacts a student may see the names; the rest are the staff's.
STAFF_ARTIFACTS = ("judge",)


def as_seen_by(record: Record, view: View) -> Record:
    """Return the record with everything removed that the viewer must not see.

    A student's view of a hidden check keeps its title, status and hint, and no input or value.
    """
    if view == "staff":
        return record
    items = tuple(
        item.model_copy(update={"checks": tuple(_for_student(check) for check in item.checks)}) for item in record.items
    )
    kept = tuple(artifact for artifact in record.artifacts if artifact.name not in STAFF_ARTIFACTS)
    environment = {key: value for key, value in record.environment.items() if key != "seed"}
    return record.model_copy(update={"items": items, "artifacts": kept, "environment": environment})


def _for_student(check: Check) -> Check:
    if check.visibility == "public":
        return check
    return check.model_copy(update={"message": "", "details": {}, "metrics": {}})
