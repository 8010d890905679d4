"""Every planned check has a result, and what stands on a failed item is skipped with the reason."""

from pathlib import Path
from typing import Any

import pytest

from grader.assignment.manifest import Manifest
from grader.errors import InfrastructureError
from grader.judge.context import CheckResult, Context, Official
from grader.judge.results import append, read_results, settle
from grader.record import Check, CheckStatus

S = CheckStatus


def words(text: str) -> dict[str, str]:
    return {"en": text, "zh": f"{text}（中）"}


def item(name: str, *depends: str, checks: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    announced = checks or ({"id": "only", "title": words("only")},)
    return {"id": name, "title": words(name), "points": 10, "depends": depends, "checks": announced}


def manifest(*items: dict[str, Any]) -> Manifest:
    policy = {"export": [], "editable": []}
    head = {"id": "a", "version": "1", "title": words("a"), "track": "torch", "detect": {"files": []}, "policy": policy}
    return Manifest.model_validate({**head, "items": items})


def context(folder: Path, **more: Any) -> Context:
    values = {"assignment_dir": folder, "kind": "local", "workspace_dir": folder, "results_path": folder / "r.jsonl"}
    return Context(**{**values, "seed": 1, **more})


def result(name: str, status: CheckStatus, check: str = "only") -> CheckResult:
    return CheckResult(item=name, check=Check(id=check, title=check, status=status, message="m", hint="h"))


def statuses(results: tuple[CheckResult, ...]) -> dict[str, CheckStatus]:
    return {f"{each.item}/{each.check.id}": each.check.status for each in results}


def test_a_check_without_a_result_is_an_infrastructure_error_with_its_title(tmp_path: Path) -> None:
    (lost,) = settle(context(tmp_path, language="zh"), manifest(item("base")), [], "the judge died")
    assert (lost.check.status, lost.check.title, lost.check.message) == (S.INFRA_ERROR, "only（中）", "the judge died")


def test_an_official_case_without_a_result_is_one_too(tmp_path: Path) -> None:
    official = {"base": Official(target="test_base", cases=("Suite.One", "Suite.Two"))}
    came = [result("base", S.PASSED, "official/Suite.One"), result("base", S.PASSED)]
    assert statuses(settle(context(tmp_path, official=official), manifest(item("base")), came)) == {
        "base/official/Suite.One": S.PASSED,
        "base/official/Suite.Two": S.INFRA_ERROR,
        "base/only": S.PASSED,
    }


@pytest.mark.parametrize("status", [S.FAILED, S.CRASHED, S.TIMEOUT, S.OUT_OF_MEMORY, S.BUILD_ERROR, S.SUSPICIOUS])
def test_what_stands_on_a_failed_item_is_skipped_all_the_way_up_whatever_came(
    tmp_path: Path, status: CheckStatus
) -> None:
    course = manifest(item("base"), item("middle", "base"), item("top", "middle"), item("apart"))
    came = [result("top", S.PASSED), result("apart", S.PASSED), result("middle", S.INFRA_ERROR), result("base", status)]
    settled = settle(context(tmp_path), course, came)
    assert statuses(settled) == {
        "base/only": status,
        "middle/only": S.SKIPPED,
        "top/only": S.SKIPPED,
        "apart/only": S.PASSED,
    }
    top = settled[2].check
    assert top.message == f"needs 'base', whose check 'only' ended as {status.value}"
    assert (top.hint, top.details) == ("", {})


@pytest.mark.parametrize("status", [S.PASSED, S.NOT_RUN, S.INFRA_ERROR])
def test_what_did_not_fail_brings_nothing_down(tmp_path: Path, status: CheckStatus) -> None:
    course = manifest(item("base"), item("top", "base"))
    settled = settle(context(tmp_path), course, [result("base", status), result("top", S.PASSED)])
    assert statuses(settled)["top/only"] is S.PASSED


def test_failed_advice_brings_nothing_down(tmp_path: Path) -> None:
    checks = ({"id": "only", "title": words("only")}, {"id": "tip", "title": words("tip"), "advice": True})
    course = manifest(item("base", checks=checks), item("top", "base"))
    came = [result("base", S.PASSED), result("base", S.CRASHED, "tip"), result("top", S.PASSED)]
    assert statuses(settle(context(tmp_path), course, came))["top/only"] is S.PASSED


def test_a_students_own_check_plans_no_hidden_checks(tmp_path: Path) -> None:
    checks = ({"id": "open", "title": words("o")}, {"id": "secret", "title": words("s"), "visibility": "hidden"})
    settled = settle(context(tmp_path, public_only=True), manifest(item("base", checks=checks)), [])
    assert [each.check.id for each in settled] == ["open"]


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert read_results(path) == ()
    append(path, result("base", S.PASSED))
    with path.open("a") as stream:
        stream.write('{"item": "ba')
    assert [each.item for each in read_results(path)] == ["base"]


def test_a_line_that_is_no_result_is_our_own_fault(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"item": "base", "points": 100}\n')
    with pytest.raises(InfrastructureError, match="no result"):
        read_results(path)
