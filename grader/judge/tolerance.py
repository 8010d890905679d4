"""When two tensors count as equal. Every bound is derived from what rounding can do; none is picked to fit.

Float64 comes first: there rounding is out of the way, so what is left is a bug. Lower precisions are bounded by the
serial model's own error plus what the extra reductions must cost. `nan` and infinities never pass.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grader.judge.diagnosis import Situation, describe
from grader.judge.failure import CheckFailure

FLOAT64_RELATIVE = 1e-10
_LOW_PRECISION = frozenset({torch.float32, torch.bfloat16, torch.float16})


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return u, half the distance from 1 to the next larger number of `dtype`."""
    return torch.finfo(dtype).eps / 2


def gamma(operations: int, roundoff: float) -> float:
    """Return gamma_n = n u / (1 - n u), the relative error of n roundings.

    N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition (2002), section 3.1.

    Args:
        operations: n, how many roundings lie one upon the other.
        roundoff: u, of the precision that the answer was computed in.

    Raises:
        ValueError: n u is 1 or more, where no bound holds.
    """
    product = operations * roundoff
    if product >= 1:
        raise ValueError(f"{operations} roundings of {roundoff} have no bound: n u must be under 1")
    return product / (1 - product)


def matmul_bound(left: Tensor, right: Tensor, roundoff: float) -> Tensor:
    """Return the elementwise bound gamma_k |left| |right| of a product of inner size k, in any order of summing.

    Higham (2002), equation (3.13).

    Args:
        left: (..., m, k), the exact operands in float64.
        right: (..., k, n), the same.
        roundoff: u of the precision that the product was computed in.
    """
    return gamma(max(left.shape[-1], 1), roundoff) * (left.abs() @ right.abs())


def root_mean_square(tensors: Mapping[str, Tensor]) -> float:
    """Return the root mean square over all elements of all tensors, 0 where there are none. NaN stays NaN."""
    count = sum(tensor.numel() for tensor in tensors.values())
    total = math.fsum(float(tensor.double().square().sum()) for tensor in tensors.values())
    return math.sqrt(total / count) if count else 0.0


def compare(
    got: Tensor | None, expected: Tensor, *, name: str, situation: Situation | None = None, scale: float = 0.0
) -> None:
    """Compare one float64 tensor: max|got - expected| <= 1e-10 max(max|expected|, scale).

    Args:
        got: What the submission handed back; None where it handed back nothing of that name.
        expected: The serial model's, in float64.
        name: The tensor's name.
        situation: Rank, world size and the like, for the details and the diagnosis.
        scale: Root mean square over all tensors of this kind, so that a gradient that is mathematically zero (a key
            bias) fails nobody.

    Raises:
        CheckFailure: Missing, another shape or dtype, an element that is not finite, or over the bound.
    """
    compare_all({} if got is None else {name: got}, {name: expected}, situation=situation, scale=scale)


def compare_all(
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    kind: str = "tensor",
    situation: Situation | None = None,
    scale: float | None = None,
) -> None:
    """Compare every float64 tensor of one kind (all gradients, all parameters), and report the worst.

    Args:
        got: What the submission handed back, by name. Names that nobody asked for are ignored.
        expected: The serial model's, by name, in float64.
        kind: What they are, for the message: `gradient`, `parameter`.
        situation: Rank, world size and the like, for the details and the diagnosis.
        scale: Root mean square over the kind; that of `expected` where left out.

    Raises:
        CheckFailure: As `compare`, for the tensor that exceeds its bound most.
    """
    lower = [name for name, tensor in expected.items() if tensor.dtype in _LOW_PRECISION]
    assert not lower, f"{lower} are expected in less than float64; compare_low_precision has a bound for them"
    scale = root_mean_square(expected) if scale is None else scale
    bounds = {
        name: torch.full_like(tensor, FLOAT64_RELATIVE * max(_largest(tensor), scale))
        for name, tensor in expected.items()
    }
    _compare(got, expected, bounds, kind, situation or Situation())


def compare_within(
    got: Tensor | None, expected: Tensor, bound: Tensor, *, name: str, situation: Situation | None = None
) -> None:
    """Compare elementwise: |got - expected| <= bound. For answers in a lower precision than `expected`.

    Args:
        got: What the submission handed back, in its own precision.
        expected: The exact answer in float64, same shape; `got` may have any floating dtype.
        bound: Non-negative, broadcastable to `expected`: `matmul_bound` or one derived likewise.
        name: The tensor's name.
        situation: Rank and the like.

    Raises:
        CheckFailure: As `compare`, except that the dtype is free.
    """
    found = {} if got is None else {name: got.double() if got.is_floating_point() else got}
    _compare(found, {name: expected}, {name: bound.expand_as(expected)}, "tensor", situation or Situation())


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecision:
    """What bounds an answer in float32 or bfloat16.

    Attributes:
        exact: The serial model's tensor in float64.
        serial: The serial model's tensor in the lower precision; its dtype is what the answer must have.
        partial_rms: Root mean square of the partial sums that the reduction adds (one a rank).
        ranks: p, how many partial sums are added.
    """

    exact: Tensor
    serial: Tensor
    partial_rms: float
    ranks: int

    @property
    def bound(self) -> float:
        """Largest root mean square error: twice the serial model's own, and (p - 1) u that of the partial sums."""
        own = root_mean_square({"": self.serial.double() - self.exact})
        return 2 * own + (self.ranks - 1) * unit_roundoff(self.serial.dtype) * self.partial_rms


def compare_low_precision(
    got: Tensor | None, expected: LowPrecision, *, name: str, situation: Situation | None = None
) -> None:
    """Compare by root mean square error against float64.

    Raises:
        CheckFailure: Missing, another shape or dtype, not finite, or over the bound.
    """
    situation = situation or Situation()
    answer = _usable(got, expected.serial, name, situation).double()
    error = root_mean_square({"": answer - expected.exact})
    if not error <= expected.bound:
        numbers = {"root_mean_square_error": error, "bound": expected.bound, "shape": list(answer.shape)}
        likeness = describe({name: answer}, {name: expected.exact}, {name}, situation)
        raise _failure(f"{name} is off by {error:.3g} (root mean square)", numbers, likeness, name, situation)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _compare(
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    bounds: Mapping[str, Tensor],
    kind: str,
    situation: Situation,
) -> None:
    answers = {name: _usable(got.get(name), tensor, name, situation) for name, tensor in expected.items()}
    excess = {name: _excess(answers[name], expected[name], bounds[name]) for name in expected}
    wrong = {name for name, worst in excess.items() if not worst <= 1}
    if not wrong:
        return
    name = max(sorted(wrong), key=lambda each: excess[each])
    likeness = describe(answers, expected, wrong, situation)
    numbers = _numbers(answers[name], expected[name], bounds[name])
    numbers["wrong"] = sorted(wrong)
    numbers["compared"] = len(expected)
    count = f", and {len(wrong) - 1} more of {len(expected)} are wrong" if len(wrong) > 1 else ""
    message = f"{kind} {name}: got {numbers['got']:.9g}, expected {numbers['expected']:.9g}{count}"
    raise _failure(message, numbers, likeness, name, situation)


def _usable(got: Tensor | None, expected: Tensor, name: str, situation: Situation) -> Tensor:
    """Return `got` where it can be compared with `expected` at all."""
    assert bool(expected.isfinite().all()), f"the expected {name} is not finite: the judge's own computation is wrong"
    complaint = ""
    numbers: dict[str, object] = {}
    if got is None:
        complaint = f"{name} did not come back"
    elif got.shape != expected.shape:
        complaint = f"{name} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    elif got.dtype != expected.dtype:
        complaint = f"{name} has dtype {got.dtype}, expected {expected.dtype}"
    elif got.is_floating_point() and not bool(got.isfinite().all()):
        flat = int((~got.isfinite()).flatten().nonzero()[0])
        numbers = {"worst_index": _index(flat, got), "got": float(got.flatten()[flat])}
        complaint = f"{name} holds {numbers['got']} at {numbers['worst_index']}; every element must be finite"
    if complaint or got is None:
        raise _failure(complaint, numbers, "", name, situation)
    return got


def _excess(got: Tensor, expected: Tensor, bound: Tensor) -> float:
    """Return the largest error as a multiple of its bound; over 1 fails. An error over a bound of 0 is infinite."""
    if not expected.numel():
        return 0.0
    error = (got.double() - expected.double()).abs()
    return float(torch.where(error == 0, 0.0, error / bound.double()).max())


def _numbers(got: Tensor, expected: Tensor, bound: Tensor) -> dict[str, object]:
    error = (got.double() - expected.double()).abs()
    flat = int(torch.where(error == 0, 0.0, error / bound.double()).argmax())
    value, wanted, off = (float(tensor.flatten()[flat]) for tensor in (got, expected, error))
    return {
        "shape": list(expected.shape),
        "worst_index": _index(flat, expected),
        "got": value,
        "expected": wanted,
        "absolute_error": off,
        "relative_error": off / abs(wanted) if wanted else math.inf,
        "bound": float(bound.flatten()[flat]),
    }


def _index(flat: int, tensor: Tensor) -> list[int]:
    places = []
    for size in reversed(tensor.shape):
        flat, place = divmod(flat, size)
        places.append(place)
    return places[::-1]


def _failure(
    message: str, numbers: Mapping[str, object], likeness: str, name: str, situation: Situation
) -> CheckFailure:
    details = {**situation.details(), "tensor": name, **numbers}
    if likeness:
        details["looks_like"] = likeness
    where = f"rank {situation.rank}: " if situation.rank is not None else ""
    return CheckFailure(f"{where}{message}" + (f". {likeness}" if likeness else ""), details, likeness)
