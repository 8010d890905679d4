"""The sample repository: a student-like history, made anew from the package's own files, always the same."""

import subprocess
from pathlib import Path

import pytest

from assignments.data_parallel import sample
from assignments.data_parallel.sample import SOLUTION, make
from grader.errors import InfrastructureError

ROOT = Path(__file__).parents[3]


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[sample.Stage, ...]]:
    folder = tmp_path_factory.mktemp("sample") / "repository"
    return folder, make(folder)


def test_the_history_reads_like_a_students(made: tuple[Path, tuple[sample.Stage, ...]]) -> None:
    folder, stages = made
    assert [stage.name for stage in stages] == ["starter", "half done", "a bug", "right"]
    assert git(folder, "log", "--reverse", "--format=%H").split() == [stage.commit for stage in stages]
    assert git(folder, "status", "--porcelain") == ""
    changed = git(folder, "diff", "--name-only", stages[0].commit, stages[-1].commit).split()
    assert changed == [f"parallel/{SOLUTION}"]


def test_it_is_the_same_whenever_it_is_made(
    made: tuple[Path, tuple[sample.Stage, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    monkeypatch.setenv("TZ", "America/Lima")
    assert [stage.commit for stage in make(tmp_path / "again")] == [stage.commit for stage in made[1]]


def test_the_last_commit_is_the_reference_and_the_first_is_not(
    made: tuple[Path, tuple[sample.Stage, ...]],
) -> None:
    folder, stages = made
    solution = (ROOT / "reference" / SOLUTION).read_text()
    texts = [git(folder, "show", f"{stage.commit}:parallel/{SOLUTION}") for stage in stages]
    assert texts[-1] == solution
    assert len(set(texts)) == len(texts)
    assert texts[0].count("NotImplementedError") > texts[1].count("NotImplementedError") == 1


def test_links_name_the_commit_in_full(made: tuple[Path, tuple[sample.Stage, ...]]) -> None:
    folder, stages = made
    assert stages[-1].link == f"file://{folder.resolve()}@{stages[-1].commit}"
    assert len(stages[-1].commit) == 40


def test_a_reference_that_leaves_no_place_for_the_bug_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_SUM", "return nothing_like_it")
    with pytest.raises(InfrastructureError, match="no place"):
        make(tmp_path / "repository")


def test_a_folder_that_holds_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("not a repository")
    with pytest.raises(InfrastructureError, match="git init failed"):
        make(tmp_path)
