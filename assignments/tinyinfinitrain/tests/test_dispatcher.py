"""Registering and calling kernels, with values and names that nobody can foresee."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assignments.tinyinfinitrain.tests import cases, rounding, tasks
from assignments.tinyinfinitrain.tests.cases import Outcome, Submission
from grader.judge.failure import require
from grader.judge.tolerance import compare_within

ENDS_WELL = ("call_values", "call_references", "two_devices")
MUST_BE_REFUSED = ("duplicate_by_name", "duplicate_by_macro", "missing_kernel")
_LENGTH = 9


def draw(generator: torch.Generator) -> dict[str, Tensor]:
    """Return whole numbers (a beyond 32 bits, b within), real numbers (c whole, d any), and two vectors."""
    wholes = [int(torch.randint(low, high, (), generator=generator)) for low, high in ((1 << 33, 1 << 45), (3, 10**6))]
    c = float(torch.randint(1, 1000, (), generator=generator))
    d = float(torch.randn((), generator=generator))
    a, b = (torch.randn(_LENGTH, generator=generator) for _ in range(2))
    return {"wholes": torch.tensor(wholes), "reals": torch.tensor([c, d]), "a": a, "b": b}


def random_name(generator: torch.Generator) -> str:
    """Return a kernel's name that no program holds."""
    return "Kernel" + "".join(chr(ord("a") + int(i)) for i in torch.randint(0, 26, (12,), generator=generator))


def _same(outcome: Outcome, name: str, expected: Tensor) -> None:
    compare_within(outcome.get(name), expected, rounding.exactly(expected), name=f"{name} ({outcome.case})")


def _judge_values(outcome: Outcome, given: dict[str, Tensor]) -> None:
    (a, b), (c, d) = given["wholes"].tolist(), given["reals"].double().tolist()
    weighted = 3 * a + 5 * b + 7 * int(c)
    found = outcome.number("weighted")
    require(found == weighted, f"a kernel of (int64, int, float) returned {found}, expected {weighted}")
    _same(outcome, "reals", torch.tensor([2 * c - d], dtype=torch.float64))


def _judge_references(outcome: Outcome, given: dict[str, Tensor]) -> None:
    total = given["reals"].sum().double().reshape(1)  # one rounding, the same everywhere
    _same(outcome, "accumulated", total)
    products = given["a"].double() * given["b"].double()
    bound = rounding.roundings(_LENGTH, products).reshape(1)
    compare_within(outcome.get("dot"), products.sum().reshape(1), bound, name=f"dot ({outcome.case})")
    _same(outcome, "passed", given["a"].double())


def _judge_two_devices(outcome: Outcome, given: dict[str, Tensor]) -> None:
    b = int(given["wholes"][1])
    found = outcome.get("results")
    results = [] if found is None else found.tolist()
    expected = [b + 1000, b + 2000, b + 1, b + 2]
    require(results == expected, f"kernels of one name on two devices returned {results}, expected {expected}")


JUDGES: dict[str, Callable[[Outcome, dict[str, Tensor]], None]] = {
    "call_values": _judge_values,
    "call_references": _judge_references,
    "two_devices": _judge_two_devices,
}


def judge_refusal(outcome: Outcome, given: dict[str, Tensor]) -> None:
    """Judge a case that must end the process, after the kernel of that name was called once.

    Raises:
        CheckFailure: It went on, or did not say that the kernel was already registered.
        SubmissionFailure: It ended before it came to what was to be refused.
    """
    before = int(given["wholes"][1]) + (0 if outcome.case == "missing_kernel" else 1)
    if outcome.number("first") is None:
        raise cases.crash(outcome)
    found = outcome.number("first")
    require(found == before, f"case {outcome.case}: the kernel returned {found}, expected {before}")
    what = "a missing kernel was found" if outcome.case == "missing_kernel" else "a second registration was accepted"
    require(outcome.status != 0, f"case {outcome.case}: {what} without an error", {"case": outcome.case})
    if outcome.case != "missing_kernel":
        said = "already registered" in outcome.log.lower()
        message = f"case {outcome.case}: ended, but without saying that the kernel was already registered"
        require(said, message, {"log": outcome.log[-500:]})


@pytest.mark.check(item="dispatcher", id="probe/dispatcher")
def test_kernels_are_registered_called_and_refused(submission: Submission, generator: torch.Generator) -> None:
    """Values, references, pointers, one name on two devices; duplicates and missing kernels are refused."""
    given, name = draw(generator), random_name(generator)
    inputs = {case: given for case in (*ENDS_WELL, *MUST_BE_REFUSED)}
    outcomes = cases.run(submission, "dispatcher", "dispatcher", inputs, arguments={"name": name})

    def judge(outcome: Outcome) -> None:
        JUDGES[outcome.case](outcome, given)

    first = {case: outcomes[case] for case in ENDS_WELL}
    cases.judge_each(submission, tasks.DISPATCHER, first, judge)
    for case in MUST_BE_REFUSED:
        judge_refusal(outcomes[case], given)
