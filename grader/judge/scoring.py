"""The only place that computes points.

Torch items: points x weighted share of the checks that count. C++ items: points x the smaller of the share of
official cases passed and the weighted share of probes passed; one of them alone where the other cannot be had or cannot
run here.
What this runner cannot run leaves `available`; an infrastructure error does too, and is retried, so it costs nobody.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from grader.assignment.manifest import ItemSpec, Manifest
from grader.judge.context import CheckResult
from grader.record import Check, CheckStatus, Item, RecordStatus

OFFICIAL = "official/"


@dataclass(frozen=True, slots=True)
class Scored:
    """The points of one assignment."""

    items: tuple[Item, ...]
    score: float
    available: float
    maximum: float
    status: RecordStatus
    provisional: bool
    provisional_reason: str


def score(
    manifest: Manifest, results: Sequence[CheckResult], capabilities: Collection[str], language: str = "en"
) -> Scored:
    """Compute every item's points, and their sums.

    Args:
        manifest: What the assignment asks for.
        results: One for each check, in any order, with dependencies already settled.
        capabilities: What this runner has beyond the CPU: `cuda`, `data`.
        language: Of the reason for a provisional score.
    """
    items = [_item(spec, _checks(spec, results), capabilities, language) for spec in manifest.items]
    scored = [item for item in items if item.status not in {CheckStatus.NOT_RUN, CheckStatus.INFRA_ERROR}]
    reason = _provisional_reason(manifest, items, capabilities, language)
    return Scored(
        items=tuple(items),
        score=math.fsum(item.earned for item in scored),
        available=math.fsum(item.points for item in scored),
        maximum=manifest.maximum,
        status=_record_status(items),
        provisional=bool(reason),
        provisional_reason=reason,
    )


def counting(spec: ItemSpec, checks: Iterable[Check], capabilities: Collection[str]) -> tuple[Check, ...]:
    """Return the checks that decide an item's points on this runner.

    Advice never does, nor what could not run. On a runner with CUDA, an item that has checks on both devices is decided
    by those on CUDA: what a student's CPU path lacks there is a note.
    """
    return tuple(
        check for check in checks if check.status is not CheckStatus.NOT_RUN and not _is_note(spec, check, capabilities)
    )


def _is_note(spec: ItemSpec, check: Check, capabilities: Collection[str]) -> bool:
    announced = spec.check(check.id)
    if announced is None:
        return False
    decided_on_cuda = "cuda" in capabilities and any(other.device == "cuda" for other in spec.checks)
    return announced.advice or (decided_on_cuda and announced.device == "cpu")


def share(checks: Collection[Check]) -> float:
    """Return the share of points that checks which count have earned, from 0 to 1.

    The smaller of the official cases' share (each counts one) and the other checks' weighted share; 0 for no checks.
    """
    groups = ([c for c in checks if c.id.startswith(OFFICIAL)], [c for c in checks if not c.id.startswith(OFFICIAL)])
    return min((_weighted_share(group) for group in groups if group), default=0.0)


def _weighted_share(checks: Collection[Check]) -> float:
    passed = [check for check in checks if check.status is CheckStatus.PASSED]
    if len(passed) == len(checks):
        return 1.0
    return math.fsum(check.weight for check in passed) / math.fsum(check.weight for check in checks)


def _checks(spec: ItemSpec, results: Iterable[CheckResult]) -> tuple[Check, ...]:
    """Return an item's checks: the official cases as they come, then the others in the manifest's order."""
    order = {announced.id: place for place, announced in enumerate(spec.checks)}
    found = [result.check for result in results if result.item == spec.id]
    return tuple(sorted(found, key=lambda check: order.get(check.id, -1)))


def _item(spec: ItemSpec, checks: tuple[Check, ...], capabilities: Collection[str], language: str) -> Item:
    deciding = counting(spec, checks, capabilities)
    status = item_status(deciding)
    earns = status not in {CheckStatus.NOT_RUN, CheckStatus.INFRA_ERROR}
    return Item(
        id=spec.id,
        title=spec.title.in_language(language),
        points=spec.points,
        earned=spec.points * share(deciding) if earns else 0.0,
        status=status,
        checks=checks,
    )


def item_status(deciding: Collection[Check]) -> CheckStatus:
    """Return one word for an item: its checks' common one, `failed` where they ended badly in different ways."""
    found = {check.status for check in deciding}
    if not found:
        return CheckStatus.NOT_RUN
    if CheckStatus.INFRA_ERROR in found:
        return CheckStatus.INFRA_ERROR
    bad = found - {CheckStatus.PASSED}
    if not bad:
        return CheckStatus.PASSED
    return bad.pop() if len(bad) == 1 else CheckStatus.FAILED


def _record_status(items: Collection[Item]) -> RecordStatus:
    found = {item.status for item in items} - {CheckStatus.NOT_RUN}
    if CheckStatus.INFRA_ERROR in found:
        return RecordStatus.INFRA_ERROR
    if found == {CheckStatus.BUILD_ERROR}:
        every = [check for item in items for check in item.checks if check.status is not CheckStatus.NOT_RUN]
        if all(check.status is CheckStatus.BUILD_ERROR for check in every):
            return RecordStatus.BUILD_ERROR
    return RecordStatus.GRADED


def _provisional_reason(manifest: Manifest, items: Iterable[Item], capabilities: Collection[str], language: str) -> str:
    """Say why a better runner, or another try, would supersede this score; empty where nothing would."""
    reasons = []
    for spec, item in zip(manifest.items, items, strict=True):
        if item.status is CheckStatus.INFRA_ERROR:
            broke = {
                "en": f"{spec.id}: the grader itself failed, which costs no points; grade again",
                "zh": f"{spec.id}：评测系统自身出错，不扣分；请重新评测",
            }
            reasons.append(broke.get(language, broke["en"]))
        elif spec.provisional_on_cpu is not None and "cuda" not in capabilities:
            reasons.append(f"{spec.id}: {spec.provisional_on_cpu.in_language(language)}")
    return "; ".join(reasons)
