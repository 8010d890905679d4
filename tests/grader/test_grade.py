import subprocess
from pathlib import Path

import pytest

from assignments.data_parallel import sample
from grader import grade
from grader.errors import SourceError, UsageError
from grader.job import Request
from grader.record import CheckStatus, RecordStatus
from grader.settings import Settings
from tests.fixtures.python_repositories import make_repository


class Silent:
    def phase(self, name):
        pass

    def note(self, text):
        pass


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return Settings(cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    return {stage.name: stage for stage in sample.make(tmp_path_factory.mktemp("sample") / "student")}


def graded(settings, link, **options):
    request = Request(**{"link": link, "runner": "local", **options})
    return grade.grade(request, settings, Silent())


def test_history_of_a_student_is_graded_stage_by_stage(settings, stages):
    scores = {}
    for name in ("starter", "half done", "right"):
        (grading,) = graded(settings, stages[name].link)
        assert grading.record.status is RecordStatus.GRADED
        scores[name] = grading.record.score
    assert scores["starter"] == 0
    assert 0 < scores["half done"] < 100
    assert scores["right"] == 100


def test_fresh_grading_draws_other_inputs_and_comes_to_the_same_score(settings, stages):
    first, second = (graded(settings, stages["right"].link, fresh=True)[0].record for _ in range(2))
    assert first.environment["seed"] != second.environment["seed"]
    assert first.score == second.score == 100


def test_titles_and_hints_are_in_the_language_that_was_asked_for(settings, stages):
    (grading,) = graded(settings, stages["right"].link, language="zh")
    assert grading.record.assignment.title == "数据并行训练"


def test_commit_without_an_assignment_is_refused_and_says_what_to_do(settings, tmp_path):
    commit = make_repository(tmp_path / "empty", {"README.md": b"nothing here\n"})
    with pytest.raises(SourceError, match="holds no assignment") as caught:
        graded(settings, f"file://{tmp_path / 'empty'}@{commit}")
    assert "data_parallel" in caught.value.advice


def test_branch_instead_of_a_commit_is_refused_with_the_exact_link(settings, tmp_path, monkeypatch):
    commit = make_repository(tmp_path / "student", {"README.md": b"mine\n"})
    config = tmp_path / "gitconfig"
    config.write_text(
        f'[url "file://{tmp_path}/student"]\n\tinsteadOf = https://github.com/u/student\n[safe]\n\tdirectory = *\n'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    with pytest.raises(UsageError) as caught:
        graded(settings, "https://github.com/u/student/tree/main")
    assert f"https://github.com/u/student/tree/{commit}" in caught.value.advice


def test_given_files_replace_what_a_student_put_in_their_place(settings, stages, tmp_path):
    link = stages["right"].link
    folder = link.removeprefix("file://").rsplit("@", 1)[0]
    subprocess.run(["git", "clone", "--quiet", folder, str(tmp_path / "forged")], check=True)
    target = tmp_path / "forged" / "parallel" / "comm.py"
    target.write_text("raise SystemExit(0)\n")
    identity = ["-c", "user.name=s", "-c", "user.email=s@example.org"]
    git = ["git", "-C", str(tmp_path / "forged"), *identity]
    subprocess.run([*git, "commit", "--quiet", "--all", "--message", "replace"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (grading,) = graded(settings, f"file://{tmp_path / 'forged'}@{commit}")
    assert grading.record.score == 100
    assert [flag.path for flag in grading.record.flags if flag.severity == "warning"] == ["parallel/comm.py"]


def test_public_checks_run_on_a_working_tree(stages, settings):
    folder = stages["right"].link.removeprefix("file://").rsplit("@", 1)[0]
    (grading,) = grade.check(Path(folder), None, "en", settings, Silent())
    checks = [check for item in grading.record.items for check in item.checks]
    assert checks
    assert {check.visibility for check in checks} == {"public"}
    assert {check.status for check in checks} == {CheckStatus.PASSED}
