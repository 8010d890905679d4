"""A wrong answer is described by what it looks like, and only where it really looks so."""

import pytest
import torch
from torch import Tensor

from grader.judge.diagnosis import Situation, constant_ratio, describe


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXPECTED = {
    "wte.weight": normal(7, 4, seed=1),
    "ln_1.weight": normal(4, seed=2),
    "ln_1.bias": normal(4, seed=3),
    "proj.weight": normal(4, 4, seed=4),
    "proj.bias": normal(4, seed=5),
}
CASE = Situation(rank=0, world_size=4, numbers=(("the number of microbatches", 3.0),))


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (4.0, "4x the expected: that is the world size."),
        (0.25, "0.25x the expected: that is 1 / the world size."),
        (3.0, "3x the expected: that is the number of microbatches."),
        (16.0, "16x the expected: that is the square of the world size."),
        (0.75, "that is the number of microbatches / the world size."),
        (-1.0, "-1x the expected: the sign is wrong."),
        (1.7, "1.7x the expected."),
    ],
)
def test_a_constant_factor_is_named_where_the_case_knows_it(factor: float, words: str) -> None:
    got = {name: factor * tensor for name, tensor in EXPECTED.items()}
    assert describe(got, EXPECTED, EXPECTED, CASE).endswith(words)


def test_a_factor_of_some_tensors_says_so() -> None:
    got = {**EXPECTED, "proj.bias": 4 * EXPECTED["proj.bias"]}
    assert describe(got, EXPECTED, {"proj.bias"}, CASE) == (
        "Every wrong tensor is 4x the expected: that is the world size. Only proj.bias is wrong."
    )


def test_zeros_are_told() -> None:
    got = {name: torch.zeros_like(tensor) for name, tensor in EXPECTED.items()}
    assert "is 0" in describe(got, EXPECTED, EXPECTED, CASE)


def test_one_number_everywhere_is_told() -> None:
    got = {name: torch.full_like(tensor, 0.5) for name, tensor in EXPECTED.items()}
    assert "one and the same number" in describe(got, EXPECTED, EXPECTED, CASE)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("biases", {"ln_1.bias", "proj.bias"}),
        ("norm parameters", {"ln_1.weight", "ln_1.bias"}),
        ("embeddings", {"wte.weight"}),
        ("matrices", {"wte.weight", "proj.weight"}),
    ],
)
def test_one_kind_of_parameter_is_told(kind: str, names: set[str]) -> None:
    got = {
        name: tensor + normal(*tensor.shape, seed=9) if name in names else tensor for name, tensor in EXPECTED.items()
    }
    assert describe(got, EXPECTED, names, CASE) == f"All {kind} are wrong, and only they."


def test_a_transpose_and_wrong_rows_are_told() -> None:
    square = {"w": normal(5, 5)}
    assert "transpose" in describe({"w": square["w"].T}, square, {"w"}, CASE)
    rows = square["w"].clone()
    rows[2:4] += 1
    assert "Only 2 of 5 rows are wrong, from row 2 to row 3" in describe({"w": rows}, square, {"w"}, CASE)


def test_noise_looks_like_nothing() -> None:
    got = {name: tensor + normal(*tensor.shape, seed=11) for name, tensor in EXPECTED.items()}
    assert describe(got, EXPECTED, EXPECTED, CASE) == ""


def test_nearly_constant_is_not_constant() -> None:
    expected = normal(100)
    got = 4 * expected
    got[7] *= 1.001
    assert constant_ratio(got, expected) is None
    assert constant_ratio(expected.clone(), expected) is None
    assert constant_ratio(expected, torch.zeros(100, dtype=torch.float64)) is None
