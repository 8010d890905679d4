"""Where ranks are wrong, it is said which, and whether they agree."""

import pytest
import torch
from torch import Tensor

from grader.judge.failure import CheckFailure
from grader.judge.ranks import compare_ranks

EXPECTED = {"w": torch.arange(1.0, 7.0, dtype=torch.float64), "b": torch.ones(3, dtype=torch.float64)}


def times(factor: float) -> dict[str, Tensor]:
    return {name: factor * tensor for name, tensor in EXPECTED.items()}


def failure(*got: dict[str, Tensor]) -> CheckFailure:
    with pytest.raises(CheckFailure) as caught:
        compare_ranks(got, EXPECTED, kind="gradient")
    return caught.value


def test_right_on_every_rank_passes() -> None:
    compare_ranks([times(1.0)] * 3, EXPECTED, kind="gradient")


def test_one_wrong_rank_is_named_wherever_it_is() -> None:
    error = failure(times(1.0), times(1.0), times(3.0))
    assert error.message.startswith("rank 2: gradient ")
    assert error.details["wrong_ranks"] == [2]
    assert error.hint == (
        "Every value is 3x the expected: that is the world size. "
        "Only rank 2 of 3 differs; the other ranks have the right gradients."
    )


def test_alike_and_wrong_is_told_from_apart_and_wrong() -> None:
    assert failure(times(2.0), times(2.0)).hint.endswith("All ranks hold the same wrong gradients.")
    assert "The ranks disagree" in failure(times(2.0), times(3.0)).hint
    assert "The ranks disagree" in failure(times(2.0), {"w": 2 * EXPECTED["w"]}).hint


def test_what_one_rank_did_not_hand_back_is_told() -> None:
    error = failure(times(1.0), {"w": EXPECTED["w"]})
    assert error.message.startswith("rank 1: b did not come back")


def test_alone_there_is_nothing_to_say_about_ranks() -> None:
    assert "rank" not in failure(times(1.7)).hint
