"""Bounds are what rounding can do: an honest answer lies within, a bug does not, and `nan` never passes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grader.judge.diagnosis import Situation
from grader.judge.failure import CheckFailure
from grader.judge.tolerance import (
    LowPrecision,
    compare,
    compare_all,
    compare_low_precision,
    compare_within,
    gamma,
    matmul_bound,
    root_mean_square,
    unit_roundoff,
)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def failure(got: dict[str, Tensor], expected: dict[str, Tensor], situation: Situation | None = None) -> CheckFailure:
    with pytest.raises(CheckFailure) as caught:
        compare_all(got, expected, kind="gradient", situation=situation)
    return caught.value


def test_another_order_of_summing_passes_in_float64() -> None:
    parts = normal(4, 1000)
    expected = parts.sum(0)
    compare(parts[3] + parts[1] + parts[0] + parts[2], expected, name="sum")


def test_single_precision_is_no_double_precision() -> None:
    parts = normal(4, 1000)
    with pytest.raises(CheckFailure):
        compare(parts.float().sum(0).double(), parts.sum(0), name="sum")


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
def test_what_is_not_finite_never_passes(poison: float, *, everywhere: bool) -> None:
    expected = normal(3, 4)
    got = torch.full_like(expected, poison) if everywhere else expected.clone()
    got[1, 2] = poison
    error = failure({"w": got}, {"w": expected})
    assert "must be finite" in error.message
    if not everywhere:
        assert error.details["worst_index"] == [1, 2]


@pytest.mark.parametrize(
    ("got", "complaint"),
    [
        (None, "did not come back"),
        (torch.zeros(0, dtype=torch.float64), r"shape \(0,\), expected \(3,\)"),
        (torch.zeros(3, 1, dtype=torch.float64), r"shape \(3, 1\)"),
        (torch.zeros(3), r"dtype torch.float32, expected torch.float64"),
        (torch.zeros(3, dtype=torch.int64), "dtype"),
    ],
)
def test_missing_empty_reshaped_or_other_dtype_is_told_as_such(got: Tensor | None, complaint: str) -> None:
    with pytest.raises(CheckFailure, match=complaint):
        compare(got, torch.zeros(3, dtype=torch.float64), name="w")


def test_an_expected_value_that_is_not_finite_is_our_own_fault() -> None:
    broken = torch.tensor([math.nan], dtype=torch.float64)
    with pytest.raises(AssertionError, match="the judge's own computation"):
        compare(broken, broken, name="w")


def test_noise_in_a_gradient_that_is_zero_passes_by_the_scale_of_its_kind() -> None:
    expected = {"key.bias": torch.full((8,), 1e-17, dtype=torch.float64), "weight": normal(8, 8)}
    compare_all({"key.bias": -expected["key.bias"] * 3, "weight": expected["weight"]}, expected)
    with pytest.raises(CheckFailure):
        compare(-expected["key.bias"] * 3, expected["key.bias"], name="key.bias")


def test_a_failed_number_names_rank_tensor_index_values_errors_and_bound() -> None:
    expected = {"a": normal(4, 5), "b": normal(3)}
    got = {name: tensor.clone() for name, tensor in expected.items()}
    got["a"][2, 3] += 0.5
    details = failure(got, expected, Situation(rank=1, world_size=4)).details
    assert (details["rank"], details["world_size"], details["tensor"]) == (1, 4, "a")
    assert details["worst_index"] == [2, 3]
    assert details["got"] == pytest.approx(float(expected["a"][2, 3]) + 0.5)
    assert details["expected"] == float(expected["a"][2, 3])
    assert details["absolute_error"] == pytest.approx(0.5)
    assert details["relative_error"] == pytest.approx(0.5 / abs(float(expected["a"][2, 3])))
    largest = max(float(expected["a"].abs().max()), root_mean_square(expected))
    assert details["bound"] == pytest.approx(1e-10 * largest)
    assert details["wrong"] == ["a"]
    assert details["looks_like"].startswith("Only ")


def test_a_constant_factor_is_told_and_named() -> None:
    expected = {"a": normal(4, 5), "b": normal(3)}
    error = failure({n: 4 * t for n, t in expected.items()}, expected, Situation(rank=0, world_size=4))
    assert error.hint == "Every value is 4x the expected: that is the world size."


def test_a_hint_holds_no_value() -> None:
    expected = {"a": normal(4, 5)}
    got = {"a": expected["a"].clone()}
    got["a"][0, 0] = 123.456
    assert "123" not in failure(got, expected).hint


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 1 << 30))
def test_a_product_in_single_precision_lies_within_its_bound(inner: int, outer: int, seed: int) -> None:
    left, right = normal(outer, inner, seed=seed).float(), normal(inner, outer, seed=seed + 1).float()
    bound = matmul_bound(left.double(), right.double(), unit_roundoff(torch.float32))
    compare_within(left @ right, left.double() @ right.double(), bound, name="product")


def test_a_product_that_is_wrong_in_one_place_does_not() -> None:
    left, right = normal(5, 30).float(), normal(30, 7).float()
    exact = left.double() @ right.double()
    got = (left @ right).clone()
    got[3, 4] += 1e-3
    with pytest.raises(CheckFailure) as caught:
        compare_within(got, exact, matmul_bound(left.double(), right.double(), 2**-24), name="product")
    assert caught.value.details["worst_index"] == [3, 4]


def test_where_no_rounding_can_happen_nothing_but_the_exact_value_passes() -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    compare_within(torch.zeros(2), zero, zero, name="zeros")
    with pytest.raises(CheckFailure):
        compare_within(torch.tensor([0.0, 1e-30]), zero, zero, name="zeros")


def test_whole_numbers_are_compared_exactly() -> None:
    tokens = torch.tensor([1, 2, 3])
    compare_all({"tokens": tokens.clone()}, {"tokens": tokens})
    with pytest.raises(CheckFailure):
        compare_all({"tokens": torch.tensor([1, 2, 4])}, {"tokens": tokens})


def test_gamma_refuses_what_has_no_bound() -> None:
    assert gamma(10, 2**-24) == pytest.approx(10 * 2**-24, rel=1e-5)
    with pytest.raises(ValueError, match="no bound"):
        gamma(1 << 24, 2**-24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_over_ranks_in_low_precision_passes_and_a_wrong_scale_fails(dtype: torch.dtype, ranks: int) -> None:
    parts = normal(ranks, 4096).to(dtype)
    exact = parts.double().sum(0)
    summed = parts[-1].clone()
    for part in parts[:-1]:
        summed += part
    bound = LowPrecision(
        exact=exact,
        serial=exact.to(dtype),
        partial_rms=root_mean_square({"": parts.double()}) * math.sqrt(ranks),
        ranks=ranks,
    )
    compare_low_precision(summed, bound, name="sum")
    with pytest.raises(CheckFailure, match="root mean square"):
        compare_low_precision(summed * 2, bound, name="sum")
