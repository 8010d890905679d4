"""Results on their way from the judge's process: a JSON object a line, then made whole and consistent."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from grader.assignment.manifest import ItemSpec, Manifest
from grader.errors import InfrastructureError
from grader.judge.context import CheckResult, Context, planned
from grader.judge.outcome import Claim, Ending, to_result
from grader.judge.scoring import counting
from grader.record import Check, CheckStatus

_DOWN = frozenset(set(CheckStatus) - {CheckStatus.PASSED, CheckStatus.NOT_RUN, CheckStatus.INFRA_ERROR})
_KEPT = frozenset({CheckStatus.NOT_RUN, CheckStatus.SKIPPED})


def append(path: Path, result: CheckResult) -> None:
    """Append one result."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(result.model_dump_json() + "\n")


def read_results(path: Path) -> tuple[CheckResult, ...]:
    """Read the results so far; a last line that is still being written is left for the next reading.

    Raises:
        InfrastructureError: A line is no result.
    """
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    try:
        return tuple(CheckResult.model_validate_json(line) for line in lines)
    except ValidationError as error:
        raise InfrastructureError(f"{path} holds a line that is no result: {error}") from error


def settle(
    context: Context, manifest: Manifest, results: Iterable[CheckResult], lost: str = "no result came back"
) -> tuple[CheckResult, ...]:
    """Return one result for every check that was planned, in the manifest's order.

    A planned check without a result is an infrastructure error, never silently absent. What stands on an item that
    failed is skipped with the reason, whatever order the checks ran in.

    Args:
        context: What was judged.
        manifest: What was asked.
        results: What came back.
        lost: Why a result may be missing, for its message.
    """
    found = {(result.item, result.check.id): result for result in results}
    whole = [found.get(key) or _lost(context, manifest, key, lost) for key in planned(context, manifest)]
    return _skip_dependents(manifest, whole, context)


def _lost(context: Context, manifest: Manifest, key: tuple[str, str], reason: str) -> CheckResult:
    item = manifest.item(key[0])
    claim = Claim(item, key[1], item.check(key[1]))
    return to_result(claim, Ending(CheckStatus.INFRA_ERROR, reason), language=context.language)


def _skip_dependents(manifest: Manifest, results: Sequence[CheckResult], context: Context) -> tuple[CheckResult, ...]:
    down = fallen(manifest, results, context.capabilities)
    return tuple(_skipped(manifest.item(result.item), result, down) for result in results)


def _skipped(spec: ItemSpec, result: CheckResult, down: dict[str, str]) -> CheckResult:
    reason = next((down[needed] for needed in spec.depends if needed in down), None)
    if reason is None or result.check.status in _KEPT:
        return result
    clean = {"message": reason, "hint": "", "details": {}, "metrics": {}, "status": CheckStatus.SKIPPED}
    return CheckResult(item=result.item, check=result.check.model_copy(update=clean))


def fallen(manifest: Manifest, results: Sequence[CheckResult], capabilities: Collection[str]) -> dict[str, str]:
    """Return the items that failed, or stand on one that did, each with the reason that its dependents are told.

    An item that could not run here, or that our own fault kept from running, brings nothing down.
    """
    down: dict[str, str] = {}
    for spec in manifest.items:
        checks = [result.check for result in results if result.item == spec.id]
        failed = next((check for check in counting(spec, checks, capabilities) if check.status in _DOWN), None)
        inherited = next((down[needed] for needed in spec.depends if needed in down), None)
        if inherited is not None:
            down[spec.id] = inherited
        elif failed is not None:
            down[spec.id] = _reason(spec, failed)
    return down


def _reason(spec: ItemSpec, failed: Check) -> str:
    return f"needs {spec.id!r}, whose check {failed.id!r} ended as {failed.status.value}"
