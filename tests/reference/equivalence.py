"""When are two sets of numbers equal? The one place that holds the tolerances of these tests.

float64: rounding is out of the way, so what is left is a bug. Per tensor, max|got - expected| may be at most 1e-10 of
max(max|expected|, root mean square over all tensors of that kind): a gradient that is mathematically zero (a key's
bias) fails nobody.

float32, bfloat16: the root mean square error against float64 may be at most twice the serial model's own, plus
(p - 1) u times the root mean square of the partial sums, u the unit roundoff: what p - 1 more additions must cost.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

RELATIVE = 1e-10


def assert_equal_in_float64(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], kind: str) -> None:
    """Compare tensors of one kind (gradients, parameters, norms) that were computed in float64."""
    assert got.keys() == expected.keys(), f"{kind}: {sorted(got.keys() ^ expected.keys())} on one side only"
    numbers = torch.cat([tensor.reshape(-1) for tensor in expected.values()])
    typical = root_mean_square(numbers)
    for name, want in expected.items():
        have = got[name]
        assert have.shape == want.shape, f"{kind} {name}: shape {have.shape}, expected {want.shape}"
        assert have.dtype == want.dtype == torch.float64, f"{kind} {name}: {have.dtype} and {want.dtype}"
        assert torch.isfinite(have).all(), f"{kind} {name}: not finite"
        if want.numel():
            bound = RELATIVE * max(float(want.abs().max()), typical)
            error = float((have - want).abs().max())
            assert error <= bound, (
                f"{kind} {name}: off by {error:.3e}, bound {bound:.3e}, ratio {ratio(have, want):.6g}"
            )


def assert_within_rounding(
    got: Tensor, serial: Tensor, exact: Tensor, partial_sums: Sequence[Tensor], name: str = "tensor"
) -> None:
    """Compare one low-precision tensor of p ranks with what rounding must cost.

    Args:
        got: What the ranks computed, in float32 or bfloat16.
        serial: The same from the serial model in the same dtype.
        exact: The same from the serial model in float64.
        partial_sums: What each rank contributes, in float64; their sum is `exact`.
        name: For the message.
    """
    assert torch.isfinite(got).all(), f"{name}: not finite"
    assert got.dtype == serial.dtype, f"{name}: {got.dtype}, expected {serial.dtype}"
    unit = torch.finfo(got.dtype).eps / 2
    largest = sum(part.abs() for part in partial_sums)
    extra = (len(partial_sums) - 1) * unit * root_mean_square(torch.as_tensor(largest))
    bound = 2 * root_mean_square(serial.double() - exact) + extra
    error = root_mean_square(got.double() - exact)
    assert error <= bound, f"{name}: off by {error:.3e}, bound {bound:.3e}"


def root_mean_square(tensor: Tensor) -> float:
    """Return the root mean square of all elements; 0 for none."""
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def ratio(got: Tensor, expected: Tensor) -> float:
    """Return the least-squares factor between two tensors: 2 or 1/p says more than a large error."""
    norm = float((expected * expected).sum())
    return float((got * expected).sum()) / norm if norm else float("nan")
