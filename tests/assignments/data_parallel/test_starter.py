"""What a student of `data_parallel` starts from, tried as a student would: by plain pytest in a folder of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from grader.assignment.manifest import load_all
from grader.assignment.starter import starter

ROOT = Path(__file__).parents[3]
SOLUTION = "parallel/data_parallel/ddp.py"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    known = load_all(ROOT / "assignments")
    files = starter([known["data_parallel"]], known.values(), ROOT / "reference", ROOT / "assignments")
    for path, data in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    return tmp_path


def run_public_tests(repository: Path) -> str:
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    return subprocess.run(argv, cwd=repository, capture_output=True, text=True, check=False, timeout=300).stdout


def test_the_public_tests_pass_with_the_reference(repository: Path) -> None:
    (repository / SOLUTION).write_bytes((ROOT / "reference/data_parallel/ddp.py").read_bytes())
    assert "7 passed" in run_public_tests(repository)


def test_the_public_tests_name_what_is_to_be_written(repository: Path) -> None:
    assert "NotImplementedError: write DistributedDataParallel.__init__" in run_public_tests(repository)


def test_the_starter_holds_no_hidden_test_and_nothing_of_the_solution(repository: Path) -> None:
    solution = (ROOT / "reference/data_parallel/ddp.py").read_text()
    left = (repository / SOLUTION).read_text()
    for line in ("bucket.pending.wait()", "comm.all_reduce(", "register_post_accumulate_grad_hook"):
        assert line in solution
        assert line not in left
    everything = b"".join(path.read_bytes() for path in repository.rglob("*") if path.is_file())
    assert b"compare_ranks" not in everything
    assert not (repository / "harness.py").exists()
