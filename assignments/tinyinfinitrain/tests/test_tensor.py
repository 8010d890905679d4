"""Flatten and Backward."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from assignments.tinyinfinitrain.tests import cases, rounding, tasks
from assignments.tinyinfinitrain.tests.cases import Outcome, Submission
from grader.judge.tolerance import compare_within

# shape, (start, end), and perhaps the two dimensions that are exchanged first
Range = tuple[tuple[int, ...], tuple[int, int], tuple[int, int] | None]
RANGES: dict[str, Range] = {
    "all": ((3, 4), (0, -1), None),
    "all_of_three": ((2, 3, 5), (0, 2), None),
    "prefix": ((2, 3, 4), (0, 1), None),
    "middle": ((2, 3, 4, 5), (1, 2), None),
    "suffix": ((2, 3, 4), (1, -1), None),
    "one_dimension": ((2, 3, 4), (1, 1), None),
    "vector": ((6,), (0, -1), None),
    "after_transpose": ((4, 3), (0, -1), (0, 1)),
    "middle_after_transpose": ((2, 3, 4, 5), (1, 2), (1, 3)),
}
NEGATIVE_RANGES: dict[str, Range] = {
    "last_two": ((2, 3, 4), (-2, -1), None),
    "all_but_the_last": ((2, 3, 4), (0, -2), None),
    "middle": ((2, 3, 4, 5), (-3, -2), None),
}


def check_flatten(submission: Submission, generator: torch.Generator, ranges: Mapping[str, Range]) -> None:
    """Values and gradients are copied, so both are exact."""
    inputs: dict[str, dict[str, Tensor]] = {}
    for case, (shape, limits, transpose) in ranges.items():
        x = torch.randn(shape, generator=generator)
        source = x.transpose(*transpose) if transpose else x
        grad = torch.randn(source.flatten(*limits).shape, generator=generator)
        inputs[case] = {"x": x, "grad": grad, "range": torch.tensor(limits)}
        inputs[case] |= {"transpose": torch.tensor(transpose)} if transpose else {}

    def judge(outcome: Outcome) -> None:
        _, limits, transpose = ranges[outcome.case]
        x = inputs[outcome.case]["x"].double().requires_grad_()
        y = (x.transpose(*transpose) if transpose else x).flatten(*limits)
        grad_x = torch.autograd.grad(y, x, inputs[outcome.case]["grad"].double())[0]
        cases.require_filled_in(outcome, tasks.FLATTEN, ["y"])
        exact = y.detach()
        compare_within(outcome.get("y"), exact, rounding.exactly(exact), name=f"y ({outcome.case})")
        compare_within(outcome.get("grad_x"), grad_x, rounding.exactly(grad_x), name=f"grad_x ({outcome.case})")

    outcomes = cases.run(submission, "kernels", "flatten", inputs)
    cases.judge_each(submission, tasks.FLATTEN, outcomes, judge)


@pytest.mark.check(item="tensor", id="probe/flatten")
def test_flatten_merges_a_range_of_dimensions(submission: Submission, generator: torch.Generator) -> None:
    """All, a prefix, the middle, a suffix, one dimension, after a transpose; the gradient has the input's shape."""
    check_flatten(submission, generator, RANGES)


@pytest.mark.check(item="tensor", id="probe/flatten_negative_range")
def test_flatten_counts_negative_dimensions_from_the_end(submission: Submission, generator: torch.Generator) -> None:
    """An advice: the handout does not ask for it, torch does it."""
    check_flatten(submission, generator, NEGATIVE_RANGES)


# What each graph adds up to the gradient of x, and of w: terms that are summed, in float64.
Terms = Callable[[Mapping[str, Tensor]], dict[str, list[Tensor]]]


def _square(given: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    return {"grad_x": [given["grad"] * given["x"]] * 2}


def _diamond(given: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    shared = given["x"] * given["w"]
    terms = [given["grad"] * shared.cos(), given["grad"] * shared, given["grad"] * shared]
    return {"grad_x": [term * given["w"] for term in terms], "grad_w": [term * given["x"] for term in terms]}


def _two_paths(given: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    grad, x, w = given["grad"], given["x"], given["w"]
    return {"grad_x": [grad * w, grad, -grad * x.tanh().square()], "grad_w": [grad * x]}


def _two_roots(given: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    second = given["grad_second"] * given["x"]
    return {"grad_x": [2.5 * given["grad"], second, second]}


def _accumulated(given: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    roots = [given["grad"], given["grad_second"]]
    return {"grad_x": [root * given["w"] for root in roots], "grad_w": [root * given["x"] for root in roots]}


def _scalar_root(given: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    return {"grad_x": [given["x"], given["x"], given["x"].cos()]}


def _residual_chain(given: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    y, factor = given["x"], torch.ones_like(given["x"])
    for _ in range(6):
        factor = factor * (2 - y.tanh().square())
        y = y + y.tanh()
    return {"grad_x": [given["grad"] * factor]}


GRAPHS: dict[str, tuple[Terms, tuple[int, ...], tuple[str, ...]]] = {
    "square": (_square, (3, 4), ("grad",)),
    "diamond": (_diamond, (2, 3, 2), ("w", "grad")),
    "two_paths": (_two_paths, (4, 3), ("w", "grad")),
    "two_roots": (_two_roots, (5,), ("grad", "grad_second")),
    "accumulated": (_accumulated, (2, 5), ("w", "grad", "grad_second")),
    "scalar_root": (_scalar_root, (), ()),
    "residual_chain": (_residual_chain, (6,), ("grad",)),
}
# The longest graph: six layers of a sum, a function (4) and its derivative (3), each acting on rounded values of up to
# about 8, whose error a derivative of at most 2 carries on.
_ROUNDINGS = 6 * (1 + 4 + 3) * 8


@pytest.mark.check(item="tensor", id="probe/backward_shared_input")
def test_gradients_of_a_tensor_used_twice_add_up(submission: Submission, generator: torch.Generator) -> None:
    """The same tensor on different paths, in different roots, and a scalar root without a gradient given."""
    inputs = {
        case: {name: torch.randn(shape, generator=generator) for name in ("x", *names)}
        for case, (_, shape, names) in GRAPHS.items()
    }

    def judge(outcome: Outcome) -> None:
        given = {name: tensor.double() for name, tensor in inputs[outcome.case].items()}
        found = [tensor for name in ("grad_x", "grad_w") if (tensor := outcome.get(name)) is not None]
        if found and not any(bool((tensor != 0).any()) for tensor in found):
            raise cases.unfilled(tasks.BACKWARD, f"every gradient of case {outcome.case} is zero")
        for name, terms in GRAPHS[outcome.case][0](given).items():
            stacked = torch.stack(terms)
            bound = rounding.roundings(_ROUNDINGS, stacked)
            compare_within(outcome.get(name), stacked.sum(0), bound, name=f"{name} ({outcome.case})")

    outcomes = cases.run(submission, "kernels", "backward", inputs)
    cases.judge_each(submission, tasks.BACKWARD, outcomes, judge)
