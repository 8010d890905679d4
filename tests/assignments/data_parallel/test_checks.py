"""The checks of `data_parallel`, judged for real: the reference passes them, and each mistake fails where it should."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grader.assignment.manifest import load
from grader.assignment.starter import blank, given_files, symbols_by_file
from grader.judge.context import CheckResult, Context
from grader.judge.run import run
from grader.judge.scoring import score
from grader.record import CheckStatus

ROOT = Path(__file__).parents[3]
ASSIGNMENT = ROOT / "assignments/data_parallel"
SOLUTION = "data_parallel/ddp.py"
S = CheckStatus
EVERY = {"gradients_2_ranks", "gradients_4_ranks", "accumulation", "unused_parameters", "bytes_sent"}


def judge(folder: Path, change: Callable[[str], str]) -> dict[str, CheckResult]:
    """Grade the reference, changed."""
    manifest = load(ASSIGNMENT)
    files = given_files(manifest, ROOT / "reference")
    files[f"parallel/{SOLUTION}"] = change((ROOT / "reference" / SOLUTION).read_text()).encode()
    for path, data in files.items():
        (folder / "student" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "student" / path).write_bytes(data)
    context = Context(
        assignment_dir=ASSIGNMENT,
        kind="local",
        workspace_dir=folder / "student",
        seed=20,
        results_path=folder / "results.jsonl",
    )
    return {result.check.id: result for result in run(context)}


def replaced(old: str, new: str) -> Callable[[str], str]:
    def change(source: str) -> str:
        assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
        return source.replace(old, new)

    return change


def failing(results: dict[str, CheckResult]) -> set[str]:
    return {name for name, result in results.items() if result.check.status is not S.PASSED}


def test_the_reference_earns_every_point(tmp_path: Path) -> None:
    results = judge(tmp_path, lambda source: source)
    assert failing(results) == set()
    assert set(results) == EVERY
    assert score(load(ASSIGNMENT), list(results.values()), ()).score == 100
    sent = results["bytes_sent"].check.metrics
    assert 0 < sent["bytes_sent"] <= sent["bytes_limit"]


def test_the_starter_earns_nothing(tmp_path: Path) -> None:
    names = symbols_by_file([load(ASSIGNMENT)])[SOLUTION]
    results = judge(tmp_path, lambda source: blank(source, names, SOLUTION))
    assert failing(results) == EVERY
    assert "write DistributedDataParallel.__init__" in results["gradients_2_ranks"].check.message
    assert score(load(ASSIGNMENT), list(results.values()), ()).score == 0


@pytest.mark.parametrize(
    ("old", "new", "fails", "told"),
    [
        pytest.param(
            "return comm.all_reduce(bucket.flat, self.group)",
            "bucket.flat.div_(self.group.size)\n        return comm.all_reduce(bucket.flat, self.group)",
            EVERY,
            "0.25x the expected: that is 1 / the world size. All ranks hold the same wrong gradients.",
            id="averaged",
        ),
        pytest.param(
            "return comm.all_reduce(bucket.flat, self.group)",
            "return Pending()",
            EVERY,
            "The ranks disagree",
            id="never-summed",
        ),
        pytest.param(
            "broadcast_from_first((*module.parameters(), *module.buffers()), group)",
            "pass",
            EVERY,
            "Only rank 1, 2, 3 of 4 differs; the other ranks have the right parameters.",
            id="weights-not-broadcast",
        ),
        pytest.param(
            "return comm.all_reduce(bucket.flat, self.group)",
            "bucket.flat.copy_(comm.all_gather(bucket.flat[None], self.group).sum(0))\n        return Pending()",
            {"bytes_sent"},
            "More bytes were sent than a ring needs",
            id="gathered-everywhere",
        ),
        pytest.param(
            "return comm.all_reduce(bucket.flat, self.group)",
            "bucket.flat.copy_(bucket.flat.float())\n        return comm.all_reduce(bucket.flat, self.group)",
            EVERY,
            "",
            id="in-single-precision",
        ),
    ],
)
def test_a_mistake_fails_its_checks_alone_and_is_described(
    tmp_path: Path, old: str, new: str, fails: set[str], told: str
) -> None:
    results = judge(tmp_path, replaced(old, new))
    assert failing(results) == fails
    assert all(results[name].check.status is S.FAILED for name in fails)
    name = "gradients_4_ranks" if "gradients_4_ranks" in fails else min(fails)
    assert told in results[name].check.hint
