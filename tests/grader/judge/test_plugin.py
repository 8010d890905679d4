"""The judge's process, really started: how tests' endings become statuses, who is told what, and what breaks it."""

import json
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from grader.errors import InfrastructureError
from grader.judge.context import CheckResult, Context, Official
from grader.judge.run import run
from grader.record import CheckStatus

S = CheckStatus

MANIFEST = """
id = "small"
version = "1"
title = {en = "Small", zh = "小"}
track = "torch"
detect = {files = []}
policy = {export = [], editable = []}

[[items]]
id = "base"
title = {en = "Base", zh = "基础"}
points = 60

[[items.checks]]
id = "one"
title = {en = "The first", zh = "第一"}
weight = 2.5
hint = {en = "Read section 2.", zh = "见第 2 节。"}

[[items.checks]]
id = "two"
title = {en = "The second", zh = "第二"}
visibility = "hidden"

[[items]]
id = "top"
title = {en = "Top", zh = "上层"}
points = 30
depends = ["base"]

[[items.checks]]
id = "three"
title = {en = "The third", zh = "第三"}

[[items]]
id = "gpu"
title = {en = "On a GPU", zh = "GPU"}
points = 10
needs = ["cuda"]

[[items.checks]]
id = "three"
title = {en = "The third", zh = "第三"}
"""

HEAD = """
import os
import pytest
from grader.judge.failure import CheckFailure, require
from grader.tracks.messages import SubmissionFailure

def check(item, id):
    return pytest.mark.check(item=item, id=id)

"""

PASSING = """
@check("top", "three")
@check("gpu", "three")
def test_three(device, metrics):
    assert device == "cpu"
    metrics["bytes_sent"] = 12

@check("base", "one")
def test_one(): pass

@check("base", "two")
def test_two(): pass
"""


def small(folder: Path) -> Context:
    (folder / "tests").mkdir()
    (folder / "assignment.toml").write_text(MANIFEST)
    return Context(
        assignment_dir=folder, kind="local", workspace_dir=folder, seed=7, results_path=folder / "results.jsonl"
    )


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return small(tmp_path)


def judge(context: Context, tests: str, **more: Any) -> dict[str, CheckResult]:
    (context.assignment_dir / "tests/test_it.py").write_text(HEAD + textwrap.dedent(tests))
    return {f"{result.item}/{result.check.id}": result for result in run(context, checks_per_worker=1, **more)}


def statuses(results: dict[str, CheckResult]) -> dict[str, CheckStatus]:
    return {name: result.check.status for name, result in results.items()}


def test_a_passing_submission_passes_in_the_manifests_words_and_lacks_what_the_runner_lacks(context: Context) -> None:
    results = judge(context, PASSING)
    assert statuses(results) == {
        "base/one": S.PASSED,
        "base/two": S.PASSED,
        "top/three": S.PASSED,
        "gpu/three": S.NOT_RUN,
    }
    first = results["base/one"].check
    assert (first.title, first.weight, first.visibility, first.message, first.hint) == (
        "The first",
        2.5,
        "public",
        "",
        "",
    )
    assert results["base/two"].check.visibility == "hidden"
    assert results["top/three"].check.metrics == {"bytes_sent": 12.0}
    assert "cuda" in results["gpu/three"].check.message
    lines = [json.loads(line) for line in context.results_path.read_text().splitlines()]
    assert [set(line) for line in lines] == [{"item", "check"}] * 4


ENDINGS = [
    ("raise CheckFailure('off by one', {'rank': 1, 'x': float('nan')}, 'It is 4x.')", S.FAILED, "off by one"),
    ("require(False, 'nothing came')", S.FAILED, "nothing came"),
    ("raise SubmissionFailure('crashed', 'rank 1 died', {})", S.CRASHED, "rank 1 died"),
    ("raise SubmissionFailure('timeout', 'rank 1 waits', {})", S.TIMEOUT, "rank 1 waits"),
    ("raise SubmissionFailure('out_of_memory', 'rank 1', {})", S.OUT_OF_MEMORY, "rank 1"),
    ("raise SubmissionFailure('build_error', 'a.cc:1', {})", S.BUILD_ERROR, "a.cc:1"),
    ("raise SubmissionFailure('passed', 'I say so', {})", S.INFRA_ERROR, "the grader itself failed"),
    ("pytest.skip('no data here')", S.NOT_RUN, "no data here"),
    ("assert 1 == 2", S.INFRA_ERROR, "the grader itself failed: AssertionError"),
    ("{}['x']", S.INFRA_ERROR, "KeyError"),
    ("raise CheckFailure('\\x1b[31m::error::')", S.FAILED, ": :error::"),
    ("pass", S.PASSED, ""),
]


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> list[CheckResult]:
    """One judging in which each check ends in its own way."""
    context = small(tmp_path_factory.mktemp("endings"))
    item = '[[items]]\nid = "all"\ntitle = {en = "All", zh = "全"}\npoints = 1\n'
    check = '[[items.checks]]\nid = "c%d"\ntitle = {en = "c", zh = "c"}\nhint = {en = "Read on.", zh = "读"}\n'
    head = MANIFEST[: MANIFEST.index("[[items]]")] + item
    (context.assignment_dir / "assignment.toml").write_text(head + "".join(check % i for i in range(len(ENDINGS))))
    test = '@check("all", "c%d")\ndef test_%d():\n    %s\n'
    text = "".join(test % (i, i, body) for i, (body, _, _) in enumerate(ENDINGS))
    return list(judge(context, text).values())


@pytest.mark.parametrize("index", range(len(ENDINGS)), ids=[body for body, _, _ in ENDINGS])
def test_every_ending_has_its_status(endings: list[CheckResult], index: int) -> None:
    _, status, message = ENDINGS[index]
    assert endings[index].check.status is status
    assert message in endings[index].check.message


def test_what_it_looks_like_comes_before_the_standing_hint(endings: list[CheckResult]) -> None:
    assert endings[0].check.hint == "It is 4x.\nRead on."
    assert endings[0].check.details == {"rank": 1, "x": "nan"}
    assert {each.check.hint for each in endings if each.check.status in {S.PASSED, S.NOT_RUN, S.INFRA_ERROR}} == {""}


def test_a_failure_of_a_fixture_counts_as_the_checks(context: Context) -> None:
    tests = """
    @pytest.fixture
    def broken(): raise CheckFailure("not even begun")
    """ + textwrap.indent(PASSING.replace("def test_one()", "def test_one(broken)"), "    ")
    found = judge(context, tests)["base/one"].check
    assert (found.status, found.message) == (S.FAILED, "not even begun")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_stands_on_a_failed_item_is_skipped_with_the_reason(context: Context, workers: int) -> None:
    tests = PASSING.replace("def test_two(): pass", "def test_two(): raise CheckFailure('no')")
    results = judge(context, tests, workers=workers)
    assert statuses(results)["top/three"] is S.SKIPPED
    assert results["top/three"].check.message == "needs 'base', whose check 'two' ended as failed"
    assert statuses(results)["base/one"] is S.PASSED


def test_in_one_process_what_is_skipped_is_never_begun(context: Context) -> None:
    tests = PASSING.replace("def test_two(): pass", "def test_two(): raise CheckFailure('no')")
    tests = tests.replace("def test_three(device, metrics):", "def test_three(device, metrics):\n    os._exit(3)")
    assert statuses(judge(context, tests))["top/three"] is S.SKIPPED


def test_a_students_own_check_runs_public_checks_alone(context: Context) -> None:
    tests = PASSING.replace("def test_two(): pass", "def test_two(): os._exit(3)")
    results = judge(context.model_copy(update={"public_only": True}), tests)
    assert set(results) == {"base/one", "top/three", "gpu/three"}
    assert results["base/one"].check.status is S.PASSED


def test_titles_hints_and_reasons_are_in_the_readers_language(context: Context) -> None:
    tests = PASSING.replace("def test_one(): pass", "def test_one(): raise CheckFailure('no')")
    found = judge(context.model_copy(update={"language": "zh"}), tests)["base/one"].check
    assert (found.title, found.hint) == ("第一", "见第 2 节。")


def test_a_check_that_no_test_makes_is_an_infrastructure_error(context: Context) -> None:
    results = judge(context, PASSING.replace('@check("base", "two")\ndef test_two(): pass', ""))
    assert results["base/two"].check.status is S.INFRA_ERROR
    assert "no test makes the check" in results["base/two"].check.message


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ('@check("base", "four")\ndef test_four(): pass', "does not announce"),
        ('@check("other", "one")\ndef test_four(): pass', "which the manifest does not have"),
        ("def test_four(): pass", "needs a mark check"),
        ('@check("base", "one")\ndef test_four(): pass', "are both the check 'one' of 'base'"),
        ("import nothing_of_that_name", "nothing_of_that_name"),
    ],
)
def test_tests_and_manifest_that_disagree_break_the_judge_and_nobody_loses_a_point(
    context: Context, extra: str, complaint: str
) -> None:
    with pytest.raises(InfrastructureError, match=complaint):
        judge(context, PASSING + extra)


def test_a_worker_that_dies_costs_its_own_check_alone(context: Context) -> None:
    results = judge(context, PASSING.replace("def test_two(): pass", "def test_two(): os._exit(3)"), workers=2)
    assert statuses(results)["base/two"] is S.INFRA_ERROR
    assert statuses(results)["base/one"] is S.PASSED


def test_a_judge_that_dies_is_an_infrastructure_error(context: Context) -> None:
    with pytest.raises(InfrastructureError, match=r"broke \(exit code 3\)"):
        judge(context, PASSING.replace("def test_two(): pass", "def test_two(): os._exit(3)"))


def test_a_judge_that_hangs_is_ended_and_what_it_found_is_kept(context: Context) -> None:
    tests = PASSING.replace("def test_two(): pass", "def test_two():\n    import time\n    time.sleep(600)")
    began = time.monotonic()
    results = judge(context, tests, timeout_s=20)
    assert time.monotonic() - began < 60
    assert statuses(results)["base/one"] is S.PASSED
    assert statuses(results)["base/two"] is S.INFRA_ERROR
    assert "ended after 20 s" in results["base/two"].check.message


def test_progress_is_told_of_each_result_as_it_comes(context: Context) -> None:
    told: list[tuple[str, int, int]] = []
    judge(context, PASSING, progress=lambda result, done, planned: told.append((result.check.id, done, planned)))
    assert [done for _, done, _ in told] == [1, 2, 3, 4]
    assert {planned for _, _, planned in told} == {4}


def test_nothing_of_the_machines_own_pytest_changes_the_judge(
    context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(9)")
    (tmp_path / "conftest.py").write_text("raise SystemExit(9)")
    assert statuses(judge(context, PASSING))["base/one"] is S.PASSED


def test_inputs_depend_on_the_gradings_seed_and_on_the_check_alone(context: Context) -> None:
    body = "\n    import torch\n    metrics['x'] = torch.rand((), generator=generator).item()"
    tests = PASSING.replace("def test_one(): pass", f"def test_one(generator, metrics):{body}")
    tests = tests.replace("def test_two(): pass", f"def test_two(generator, metrics):{body}")

    def drawn(seed: int, **more: Any) -> tuple[float, float]:
        results = judge(context.model_copy(update={"seed": seed}), tests, **more)
        return results["base/one"].check.metrics["x"], results["base/two"].check.metrics["x"]

    first = drawn(7)
    assert first == drawn(7, workers=2)
    assert first[0] != first[1]
    assert first != drawn(8)


def test_official_cases_become_checks_of_their_own(context: Context) -> None:
    toml = context.assignment_dir / "assignment.toml"
    toml.write_text(toml.read_text().replace('track = "torch"', 'track = "cpp"'))
    official = {"base": Official(target="test_base", cases=("Suite.One", "Suite.Two"))}
    changed = context.model_copy(update={"official": official, "failed_targets": ("test_base",)})
    results = judge(changed, PASSING)
    assert list(results)[:2] == ["base/official/Suite.One", "base/official/Suite.Two"]
    case = results["base/official/Suite.One"].check
    assert (case.status, case.title) == (S.BUILD_ERROR, "Suite.One")
    assert statuses(results)["base/one"] is S.PASSED
