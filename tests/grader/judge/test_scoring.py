"""Points follow from statuses and weights alone, and nothing that is our fault costs any."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.assignment.manifest import Manifest
from grader.judge.context import CheckResult
from grader.judge.scoring import Scored, score
from grader.record import Check, CheckStatus, RecordStatus

S = CheckStatus
BAD = [S.FAILED, S.SKIPPED, S.BUILD_ERROR, S.TIMEOUT, S.OUT_OF_MEMORY, S.CRASHED, S.SUSPICIOUS]


def words(text: str) -> dict[str, str]:
    return {"en": text, "zh": text}


def manifest(*items: dict[str, Any], track: str = "torch") -> Manifest:
    return Manifest.model_validate(
        {
            "id": "course",
            "version": "1",
            "title": words("course"),
            "track": track,
            "detect": {"files": []},
            "policy": {"export": [], "editable": []},
            "items": [{"title": words(item["id"]), **item} for item in items],
        }
    )


def spec(check: str, weight: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"id": check, "title": words(check), "weight": weight, **more}


def result(item: str, check: str, status: CheckStatus, weight: float = 1.0) -> CheckResult:
    return CheckResult(item=item, check=Check(id=check, title=check, status=status, weight=weight))


def earned(scored: Scored) -> dict[str, float]:
    return {item.id: item.earned for item in scored.items}


def test_a_torch_item_earns_the_weighted_share_of_its_checks() -> None:
    course = manifest({"id": "ddp", "points": 60, "checks": [spec("a", 3), spec("b", 1), spec("c", 2)]})
    statuses = {"a": (S.PASSED, 3), "b": (S.FAILED, 1), "c": (S.PASSED, 2)}
    scored = score(course, [result("ddp", name, *values) for name, values in statuses.items()], ())
    assert scored.score == pytest.approx(50)
    assert scored.items[0].status is S.FAILED


CPP = manifest(
    {"id": "matmul", "points": 8, "official": "t.cc", "checks": [spec("probe/x", 3), spec("probe/y", 1)]}, track="cpp"
)


@pytest.mark.parametrize(
    ("official", "probes", "share"),
    [
        ((S.PASSED, S.PASSED), (S.PASSED, S.PASSED), 1.0),
        ((S.PASSED, S.PASSED), (S.FAILED, S.PASSED), 0.25),  # forged official cases earn what the probes earn
        ((S.PASSED, S.FAILED), (S.PASSED, S.PASSED), 0.5),
        ((S.PASSED, S.FAILED), (S.FAILED, S.PASSED), 0.25),
        ((S.CRASHED, S.TIMEOUT), (S.PASSED, S.PASSED), 0.0),
        ((), (S.PASSED, S.FAILED), 0.75),  # upstream cannot be had
        ((S.NOT_RUN, S.NOT_RUN), (S.PASSED, S.FAILED), 0.75),  # upstream's cases need what this runner lacks
        ((S.NOT_RUN, S.PASSED), (S.PASSED, S.PASSED), 1.0),
        ((S.PASSED,), (), 1.0),
    ],
)
def test_a_cpp_item_earns_the_smaller_share(
    official: tuple[CheckStatus, ...], probes: tuple[CheckStatus, ...], share: float
) -> None:
    results = [result("matmul", f"official/S.{i}", status) for i, status in enumerate(official)]
    weights = (("probe/x", 3.0), ("probe/y", 1.0))
    results += [result("matmul", check, s, w) for (check, w), s in zip(weights, probes, strict=False)]
    assert score(CPP, results, ()).score == pytest.approx(8 * share)


def test_what_cannot_run_here_leaves_available_and_stays_in_maximum() -> None:
    course = manifest({"id": "cpu", "points": 80}, {"id": "gpu", "points": 20, "needs": ["cuda"]})
    scored = score(course, [result("cpu", "a", S.PASSED), result("gpu", "a", S.NOT_RUN)], ())
    assert (scored.score, scored.available, scored.maximum) == (80, 80, 100)
    assert [item.status for item in scored.items] == [S.PASSED, S.NOT_RUN]
    assert not scored.provisional


def test_an_infrastructure_error_leaves_available_and_asks_for_another_try() -> None:
    course = manifest({"id": "good", "points": 40}, {"id": "ours", "points": 60})
    results = [result("good", "a", S.PASSED), result("ours", "a", S.FAILED), result("ours", "b", S.INFRA_ERROR)]
    scored = score(course, results, ())
    assert (scored.score, scored.available) == (40, 40)
    assert scored.status is RecordStatus.INFRA_ERROR
    assert scored.provisional
    assert "ours" in scored.provisional_reason


@pytest.mark.parametrize("status", list(S))
def test_advice_never_costs_and_never_earns(status: CheckStatus) -> None:
    course = manifest({"id": "a", "points": 10, "checks": [spec("x"), spec("tip", advice=True)]})
    for decisive, points in ((S.PASSED, 10), (S.FAILED, 0)):
        scored = score(course, [result("a", "x", decisive), result("a", "tip", status)], ())
        assert (scored.score, scored.available, scored.status) == (points, 10, RecordStatus.GRADED)


BOTH = {
    "id": "gpt2",
    "points": 35,
    "provisional_on_cpu": words("graded on the CPU"),
    "checks": [spec("probe/x"), spec("probe/x_cuda", device="cuda")],
}


def test_on_a_gpu_runner_the_cuda_checks_decide_and_the_cpu_ones_are_notes() -> None:
    results = [result("gpt2", "probe/x", S.CRASHED), result("gpt2", "probe/x_cuda", S.PASSED)]
    scored = score(manifest(BOTH), results, {"cuda"})
    assert (scored.score, scored.items[0].status, scored.provisional) == (35, S.PASSED, False)


def test_on_a_cpu_runner_the_cpu_checks_decide_provisionally() -> None:
    results = [result("gpt2", "probe/x", S.PASSED), result("gpt2", "probe/x_cuda", S.NOT_RUN)]
    scored = score(manifest(BOTH), results, ())
    assert (scored.score, scored.provisional, scored.provisional_reason) == (35, True, "gpt2: graded on the CPU")


def test_the_reason_is_in_the_readers_language() -> None:
    course = manifest({**BOTH, "provisional_on_cpu": {"en": "on the CPU", "zh": "在 CPU 上评测"}})
    assert "在 CPU 上评测" in score(course, [result("gpt2", "probe/x", S.PASSED)], (), "zh").provisional_reason


def test_a_tree_that_does_not_build_at_all_is_a_build_error_and_earns_nothing() -> None:
    results = [result("matmul", check, S.BUILD_ERROR) for check in ("official/S.1", "probe/x", "probe/y")]
    scored = score(CPP, results, ())
    assert (scored.score, scored.available, scored.status) == (0, 8, RecordStatus.BUILD_ERROR)


@pytest.mark.parametrize("status", BAD)
def test_an_item_whose_checks_fail_alike_has_their_status(status: CheckStatus) -> None:
    course = manifest({"id": "a", "points": 10})
    checks = [result("a", "x", S.PASSED), result("a", "y", status), result("a", "z", status)]
    assert score(course, checks, ()).items[0].status is status


def test_checks_stand_in_the_manifests_order_after_the_official_cases() -> None:
    came = ("probe/y", "probe/x", "official/B.1", "official/A.1")
    (item,) = score(CPP, [result("matmul", name, S.PASSED) for name in came], ()).items
    assert [check.id for check in item.checks] == ["official/B.1", "official/A.1", "probe/x", "probe/y"]


statuses = st.sampled_from(list(S))
weights = st.floats(0.01, 100)


@st.composite
def gradings(draw: st.DrawFn) -> tuple[Manifest, list[CheckResult]]:
    items, results = [], []
    for index in range(draw(st.integers(1, 4))):
        checks = [
            spec(f"probe/{k}", draw(weights), advice=draw(st.booleans()), device=draw(st.sampled_from(["cpu", "cuda"])))
            for k in range(draw(st.integers(0, 4)))
        ]
        items.append({"id": f"i{index}", "points": draw(st.floats(0.5, 50)), "checks": checks})
        results += [result(f"i{index}", c["id"], draw(statuses), c["weight"]) for c in checks]
        results += [result(f"i{index}", f"official/S.{k}", draw(statuses)) for k in range(draw(st.integers(0, 3)))]
    return manifest(*items, track="cpp"), results


capabilities = st.sampled_from([(), ("cuda",), ("cuda", "data")])


def changed(results: Iterable[CheckResult], index: int, status: CheckStatus) -> list[CheckResult]:
    return [
        CheckResult(item=r.item, check=r.check.model_copy(update={"status": status})) if i == index else r
        for i, r in enumerate(results)
    ]


@given(gradings(), capabilities)
def test_points_lie_between_nothing_and_what_is_available(
    grading: tuple[Manifest, list[CheckResult]], has: tuple[str, ...]
) -> None:
    scored = score(*grading, has)
    assert all(0 <= item.earned <= item.points for item in scored.items)
    assert 0 <= scored.score <= scored.available * (1 + 1e-12)
    assert scored.available <= scored.maximum * (1 + 1e-12)


@given(gradings(), capabilities, st.data())
def test_a_pass_in_place_of_a_failure_never_lowers_a_score(
    grading: tuple[Manifest, list[CheckResult]], has: tuple[str, ...], data: st.DataObject
) -> None:
    course, results = grading
    failed = [i for i, r in enumerate(results) if r.check.status in BAD]
    if failed:
        better = changed(results, data.draw(st.sampled_from(failed)), S.PASSED)
        before, after = score(course, results, has), score(course, better, has)
        assert after.score >= before.score - 1e-9
        assert after.available == before.available


@given(gradings(), capabilities, st.data())
def test_an_infrastructure_error_touches_its_own_item_alone_and_takes_it_out(
    grading: tuple[Manifest, list[CheckResult]], has: tuple[str, ...], data: st.DataObject
) -> None:
    course, results = grading
    if not results:
        return
    index = data.draw(st.integers(0, len(results) - 1))
    before, after = score(course, results, has), score(course, changed(results, index, S.INFRA_ERROR), has)
    hit = results[index].item
    for was, became in zip(before.items, after.items, strict=True):
        if was.id != hit:
            assert was == became
        elif became.status is S.INFRA_ERROR:
            assert after.available <= before.available
            assert after.provisional


@given(gradings(), capabilities)
def test_all_passed_earns_everything_that_ran_and_the_order_of_results_is_nothing(
    grading: tuple[Manifest, list[CheckResult]], has: tuple[str, ...]
) -> None:
    course, results = grading
    passed = [CheckResult(item=r.item, check=r.check.model_copy(update={"status": S.PASSED})) for r in results]
    assert score(course, passed, has).score == score(course, passed, has).available
    assert earned(score(course, results[::-1], has)) == pytest.approx(earned(score(course, results, has)))
