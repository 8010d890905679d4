"""Neg through the dispatcher: exact, since a change of sign rounds nothing."""

import pytest
import torch

from assignments.tinyinfinitrain.tests import cases, rounding, tasks
from assignments.tinyinfinitrain.tests.cases import Outcome, Submission
from grader.judge.tolerance import compare_within

SHAPES = {"vector": (7,), "matrix": (3, 5), "cube": (2, 3, 4)}


@pytest.mark.check(item="elementwise", id="probe/neg")
def test_neg_and_its_gradient_change_the_sign(submission: Submission, generator: torch.Generator) -> None:
    """Both directions, for three ranks of tensor."""
    inputs = {
        case: {name: torch.randn(shape, generator=generator) for name in ("x", "grad")}
        for case, shape in SHAPES.items()
    }

    def judge(outcome: Outcome) -> None:
        cases.require_filled_in(outcome, tasks.NEG, ["y", "grad_x"])
        for name, source in (("y", "x"), ("grad_x", "grad")):
            expected = -inputs[outcome.case][source].double()
            label = f"{name} ({outcome.case})"
            compare_within(outcome.get(name), expected, rounding.exactly(expected), name=label)

    outcomes = cases.run(submission, "kernels", "neg", inputs)
    cases.judge_each(submission, tasks.NEG, outcomes, judge)
