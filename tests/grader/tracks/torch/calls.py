"""Calls the behaviours of `student/` on ranks of a session."""

from pathlib import Path

import pytest
import torch

from grader.sandbox.base import MEBIBYTE, Specification
from grader.tracks.agent import ProgramLimits, SubmissionFailure
from grader.tracks.torch.session import RankResult, Session

STUDENT = Path(__file__).parent / "student"
LIMITS = ProgramLimits(memory_bytes=512 * MEBIBYTE)
MAX_RESULT_BYTES = 16 * MEBIBYTE


def submission() -> dict[str, bytes]:
    paths = [path for path in STUDENT.rglob("*.py") if path.name != "harness.py"]
    return {str(path.relative_to(STUDENT)): path.read_bytes() for path in paths}


def harness() -> bytes:
    return (STUDENT / "harness.py").read_bytes()


def student_files() -> dict[str, bytes]:
    return {f"submission/{path}": data for path, data in submission().items()} | {"harness.py": harness()}


def open_session(kind: str, specification: Specification, python: str, limits: ProgramLimits = LIMITS) -> Session:
    session = Session.open(kind, specification, submission(), harness(), python, limits=limits)
    session.max_result_bytes = MAX_RESULT_BYTES
    return session


def call(session: Session, name: str, ranks: int = 2, timeout_s: float = 20.0, **options) -> tuple[RankResult, ...]:
    inputs = [{"x": torch.full((3,), float(rank), dtype=torch.float64)} for rank in range(ranks)]
    return session.run("call", {"name": name, "options": options}, inputs, timeout_s)


def failure(session: Session, name: str, ranks: int = 2, timeout_s: float = 20.0, **options) -> SubmissionFailure:
    with pytest.raises(SubmissionFailure) as raised:
        call(session, name, ranks, timeout_s, **options)
    return raised.value
