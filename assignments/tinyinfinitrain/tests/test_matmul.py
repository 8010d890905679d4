"""Matrix products and their gradients, against float64 within the bound of a sum in any order."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from assignments.tinyinfinitrain.tests import cases, tasks
from assignments.tinyinfinitrain.tests.cases import Outcome, Submission
from assignments.tinyinfinitrain.tests.rounding import ROUNDOFF
from grader.judge.failure import require
from grader.judge.tolerance import compare_within, matmul_bound

# rows, inner size, columns; behind batch dimensions where there are any
SHAPES_2D = {"odd": (5, 7, 3), "one_by_one": (1, 1, 1), "row": (1, 9, 4), "column": (6, 5, 1), "outer": (4, 1, 3)}
SHAPES_BATCHED = {
    "three_dimensions": (3, 4, 5, 2),
    "three_dimensions_one_by_one": (2, 1, 1, 1),
    "one_batch": (1, 3, 2, 5),
    "four_dimensions": (2, 3, 5, 4, 7),
    "four_dimensions_square": (2, 2, 6, 6, 6),
}


def draw(shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator) -> dict[str, dict[str, Tensor]]:
    """Return operands a (..., m, k), b (..., k, n) and the output's gradient (..., m, n) by case."""
    found = {}
    for case, (*batch, rows, inner, columns) in shapes.items():
        sizes = {"a": (*batch, rows, inner), "b": (*batch, inner, columns), "grad": (*batch, rows, columns)}
        found[case] = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    return found


def compare_product(outcome: Outcome, name: str, left: Tensor, right: Tensor) -> None:
    """Compare one output with `left @ right`, float64 operands."""
    bound = matmul_bound(left, right, ROUNDOFF)
    compare_within(outcome.get(name), left @ right, bound, name=f"{name} ({outcome.case})")


def check(
    submission: Submission, inputs: Mapping[str, Mapping[str, Tensor]], device: str, *, stays: bool = False
) -> None:
    """Run and judge the cases: the product, both gradients, and where they lie if they must stay on CUDA."""
    task = tasks.MATMUL[device]

    def judge(outcome: Outcome) -> None:
        a, b, grad = (inputs[outcome.case][name].double() for name in ("a", "b", "grad"))
        cases.require_filled_in(outcome, task, ["y", "grad_a", "grad_b"])
        compare_product(outcome, "y", a, b)
        compare_product(outcome, "grad_a", grad, b.transpose(-1, -2))
        compare_product(outcome, "grad_b", a.transpose(-1, -2), grad)
        for name in ("y", "grad_a", "grad_b") if stays else ():
            place = outcome.number(f"{name}.on_cuda")
            require(place == 1, f"{name} lies on the CPU, expected on CUDA, where the operands are", {"tensor": name})

    outcomes = cases.run(submission, "kernels", "matmul", inputs, device=device)
    cases.judge_each(submission, task, outcomes, judge, device=device)


@pytest.mark.check(item="matmul", id="probe/matmul_2d")
@pytest.mark.check(item="matmul_cuda", id="probe/matmul_2d")
def test_matrix_product_and_gradients(submission: Submission, generator: torch.Generator, device: str) -> None:
    """Two dimensions, odd sizes, and sizes of one."""
    check(submission, draw(SHAPES_2D, generator), device)


@pytest.mark.check(item="matmul", id="probe/matmul_batched")
@pytest.mark.check(item="matmul_cuda", id="probe/matmul_batched")
def test_batched_product_and_gradients(submission: Submission, generator: torch.Generator, device: str) -> None:
    """Three and four dimensions, as attention needs them, forward and backward."""
    check(submission, draw(SHAPES_BATCHED, generator), device)


@pytest.mark.check(item="matmul_cuda", id="probe/result_device")
def test_results_stay_on_cuda(submission: Submission, generator: torch.Generator) -> None:
    """A product of tensors on CUDA, and its gradients, lie on CUDA."""
    check(submission, draw({"odd": (5, 7, 3)}, generator), "cuda", stays=True)
