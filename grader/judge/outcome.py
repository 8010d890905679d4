"""From how a judge's test ended to the result that the record keeps."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from grader.assignment.manifest import CheckSpec, ItemSpec
from grader.judge.context import CheckResult, Device, device_of
from grader.judge.failure import CheckFailure, plain, sanitise
from grader.record import Check, CheckStatus
from grader.tracks.messages import SubmissionFailure

_STUDENTS = frozenset(
    {
        CheckStatus.FAILED,
        CheckStatus.BUILD_ERROR,
        CheckStatus.TIMEOUT,
        CheckStatus.OUT_OF_MEMORY,
        CheckStatus.CRASHED,
        CheckStatus.SUSPICIOUS,
    }
)


class Ended(Exception):  # noqa: N818  (how a check ends before it begins, not an error)
    """A check that is not run: this runner lacks something, or what it stands on failed."""

    def __init__(self, status: CheckStatus, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Claim:
    """Which check a pytest item is. `spec` is None for an official case, which no manifest announces one by one."""

    item: ItemSpec
    id: str
    spec: CheckSpec | None

    @property
    def key(self) -> tuple[str, str]:
        """Item and check."""
        return (self.item.id, self.id)

    @property
    def visibility(self) -> str:
        """`public` or `hidden`; official cases are upstream's and public."""
        return self.spec.visibility if self.spec is not None else "public"

    @property
    def device(self) -> Device:
        """Where it runs."""
        return device_of(self.item, self.spec)

    def seed(self, grading: int) -> int:
        """Return the check's own seed, 63 bits, from the grading's, so that no check's inputs depend on another's."""
        text = f"{grading}/{self.item.id}/{self.id}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Ending:
    """How a test ended, before the manifest's words are added."""

    status: CheckStatus
    message: str = ""
    hint: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


def ending(error: BaseException | None) -> Ending:
    """Return what an exception says about the submission; one that says nothing about it is our own fault."""
    if error is None:
        return Ending(CheckStatus.PASSED)
    if isinstance(error, CheckFailure):
        return Ending(CheckStatus.FAILED, error.message, error.hint, error.details)
    if isinstance(error, Ended):
        return Ending(error.status, error.message)
    if isinstance(error, SubmissionFailure) and error.status in _STUDENTS:
        return Ending(CheckStatus(error.status), error.message, details=error.details)
    if isinstance(error, pytest.skip.Exception):
        return Ending(CheckStatus.NOT_RUN, error.msg or "")
    return Ending(CheckStatus.INFRA_ERROR, f"the grader itself failed: {type(error).__name__}: {error}")


def to_result(
    claim: Claim, ended: Ending, *, language: str, duration_s: float = 0.0, metrics: Mapping[str, float] | None = None
) -> CheckResult:
    """Return the check's result, in the manifest's words and the reader's language, safe to show anywhere."""
    return CheckResult(
        item=claim.item.id,
        check=Check(
            id=claim.id,
            title=_title(claim, language),
            status=ended.status,
            weight=claim.spec.weight if claim.spec is not None else 1.0,
            visibility=claim.spec.visibility if claim.spec is not None else "public",
            duration_s=duration_s,
            message=sanitise(ended.message),
            hint=sanitise(_hint(claim, ended, language)),
            details=plain(ended.details),
            metrics={name: float(number) for name, number in (metrics or {}).items()},
        ),
    )


def _title(claim: Claim, language: str) -> str:
    if claim.spec is not None:
        return claim.spec.title.in_language(language)
    return sanitise(claim.id.removeprefix("official/"), 200)


def _hint(claim: Claim, ended: Ending, language: str) -> str:
    """What the failure looks like comes first, then the manifest's standing advice. A pass needs neither."""
    if ended.status not in _STUDENTS:
        return ""
    standing = claim.spec.hint if claim.spec is not None else None
    parts = (ended.hint, standing.in_language(language) if standing is not None else "")
    return "\n".join(part for part in parts if part)
