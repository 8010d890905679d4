"""The submission as tests see it: lent, opened when first used, and opened anew after its sandbox broke."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from grader.assignment.manifest import Manifest
from grader.errors import InfrastructureError
from grader.judge.context import BuildError, Context
from grader.judge.programs import Build
from grader.judge.submission import Submissions, TorchSubmission, files_below
from grader.tracks.agent import SubmissionFailure

WORDS = {"en": "a", "zh": "a"}
HARNESS = """
import os, signal, torch

def add(context, inputs, arguments):
    return {"sum": inputs["x"] + arguments["more"]}

def kill_the_agent(context, inputs, arguments):
    os.kill(os.getppid(), signal.SIGKILL)

def fail(context, inputs, arguments):
    raise RuntimeError("on purpose")
"""


@pytest.fixture(scope="module")
def submissions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submissions]:
    folder = tmp_path_factory.mktemp("assignment")
    (folder / "harness.py").write_text(HARNESS)
    (folder / "student").mkdir()
    context = Context(
        assignment_dir=folder, kind="local", workspace_dir=folder / "student", seed=1, results_path=folder / "r.jsonl"
    )
    policy = {"export": [], "editable": []}
    head = {"id": "a", "version": "1", "title": WORDS, "detect": {"files": []}, "policy": policy}
    manifest = Manifest.model_validate({**head, "track": "torch", "items": [], "limits": {"case_s": 20}})
    with Submissions(context, manifest) as opened:
        yield opened


def add(submissions: Submissions, more: float) -> float:
    import torch  # noqa: PLC0415  (late, so that collecting stays quick)

    with submissions.use() as lent:
        assert isinstance(lent, TorchSubmission)
        (result,) = lent.run("add", [{"x": torch.ones(2)}], {"more": more})
    return float(result.tensors["sum"][0])


def test_the_sandbox_is_opened_once_and_used_again(submissions: Submissions) -> None:
    assert add(submissions, 1.0) == 2.0
    first = submissions._torch
    assert add(submissions, 2.0) == 3.0
    assert submissions._torch is first


def test_a_failure_of_the_students_keeps_the_sandbox(submissions: Submissions) -> None:
    add(submissions, 1.0)
    first = submissions._torch
    with pytest.raises(SubmissionFailure, match="on purpose"), submissions.use() as lent:
        lent.run("fail", [{}])  # type: ignore[union-attr]
    assert add(submissions, 1.0) == 2.0
    assert submissions._torch is first


def test_a_sandbox_that_broke_is_ours_and_the_next_check_gets_a_fresh_one(submissions: Submissions) -> None:
    with pytest.raises(InfrastructureError), submissions.use() as lent:
        lent.run("kill_the_agent", [{}])  # type: ignore[union-attr]
    assert add(submissions, 3.0) == 4.0


ERRORS = (
    BuildError(target="test_b", path="src/b.cc", line=3, message="expected ';'\n  3 | int x"),
    BuildError(target="test_a", path="src/a.cc", line=9, message="no such name"),
)


def test_what_was_built_is_there() -> None:
    Build(built=frozenset({"test_a"})).require("test_a")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("test_a", "test_a was not built: src/a.cc:9: no such name"),
        ("test_b", "test_b was not built: src/b.cc:3: expected ';'"),
        ("test_c", "test_c was not built: src/b.cc:3: expected ';'"),  # a library that it needs
    ],
)
def test_what_was_not_says_why_in_the_students_own_paths(target: str, message: str) -> None:
    build = Build(built=frozenset(), failed=frozenset({"test_a", "test_b", "test_c"}), errors=ERRORS)
    with pytest.raises(SubmissionFailure) as caught:
        build.require(target)
    assert (caught.value.status, caught.value.message) == ("build_error", message)


@pytest.mark.parametrize("ending", ["timeout", "out_of_memory"])
def test_a_build_that_was_ended_is_told_as_such(ending: str) -> None:
    with pytest.raises(SubmissionFailure) as caught:
        Build(built=frozenset(), failed=frozenset({"test_a"}), errors=ERRORS, ending=ending).require("test_a")
    assert caught.value.status == ending


def test_a_target_that_nobody_built_is_our_own_fault() -> None:
    with pytest.raises(InfrastructureError, match="neither built nor known"):
        Build(built=frozenset({"test_a"})).require("test_z")


def test_links_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/file").write_text("own")
    (tmp_path / "inside/link").symlink_to(tmp_path / "outside")
    assert files_below(tmp_path / "inside") == {"file": b"own"}
