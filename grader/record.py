"""The record: all that one grading found out. Every report is drawn from it and computes nothing."""

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


class CheckStatus(StrEnum):
    """How a check, or an item, ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # a check it depends on failed
    NOT_RUN = "not_run"  # this runner lacks what it needs: a GPU, data
    BUILD_ERROR = "build_error"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"
    SUSPICIOUS = "suspicious"
    INFRA_ERROR = "infra_error"  # never costs a student a point


class RecordStatus(StrEnum):
    """How the whole grading ended."""

    GRADED = "graded"
    BUILD_ERROR = "build_error"
    REFUSED = "refused"
    INFRA_ERROR = "infra_error"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AssignmentRef(_Model):
    """Which assignment was graded."""

    id: str
    version: str
    title: str


class Submission(_Model):
    """What was handed in. `commit` has 40 hexadecimal digits."""

    url: str
    repository: str
    commit: str
    ref_as_given: str
    student: str | None
    submitted_at: datetime


class Runner(_Model):
    """Where it ran. `isolated` is true only where student code could reach nothing of ours."""

    kind: Literal["docker", "local"]
    isolated: bool
    image: str | None = None
    image_digest: str | None = None
    devices: tuple[str, ...] = ()
    cpu: str = ""
    torch: str = ""
    toolchain: str = ""


class Phases(_Model):
    """Wall time of each phase, in seconds."""

    fetch_s: float = 0.0
    prepare_s: float = 0.0
    build_s: float = 0.0
    run_s: float = 0.0
    judge_s: float = 0.0


class Check(_Model):
    """One claim that was tested. A student sees of a hidden check its title, status and hint."""

    id: str
    title: str
    status: CheckStatus
    weight: float = 1.0
    visibility: Literal["public", "hidden"] = "public"
    duration_s: float = 0.0
    message: str = ""
    hint: str = ""
    details: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)


class Item(_Model):
    """A part of the assignment that carries points."""

    id: str
    title: str
    points: float
    earned: float
    status: CheckStatus
    checks: tuple[Check, ...] = ()


class Flag(_Model):
    """An edit or a pattern for a person to look at. A flag alone costs no point."""

    kind: str
    severity: Literal["info", "warning", "alert"]
    path: str = ""
    line: int | None = None
    message: str


class Artifact(_Model):
    """A file that belongs to this grading, relative to the record's own folder."""

    name: str
    path: str
    sha256: str


class Record(_Model):
    """One assignment of one commit, graded once. Field for field as the public contract says."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    id: str
    assignment: AssignmentRef
    submission: Submission
    runner: Runner
    started_at: datetime
    duration_s: float
    phases: Phases
    score: float
    available: float
    maximum: float
    status: RecordStatus
    provisional: bool = False
    provisional_reason: str = ""
    items: tuple[Item, ...] = ()
    flags: tuple[Flag, ...] = ()
    environment: dict[str, Any] = Field(default_factory=dict)
    artifacts: tuple[Artifact, ...] = ()
    signature: str | None = None

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)
