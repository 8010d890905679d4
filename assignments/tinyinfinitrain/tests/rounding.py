"""Bounds on what single precision can do to an answer: counted roundings, never picked numbers."""

import torch
from torch import Tensor

from grader.judge.tolerance import gamma, unit_roundoff

ROUNDOFF = unit_roundoff(torch.float32)


def roundings(count: int, terms: Tensor) -> Tensor:
    """Return the elementwise bound gamma_count times the sum of the absolute terms.

    Args:
        count: How many roundings lie one upon the other on the longest path; a library function (sin, tanh, sqrt)
            counts as 4, its error being at most 2 units in the last place.
        terms: (terms, ...) in float64: what is added up to the answer.
    """
    return gamma(count, ROUNDOFF) * terms.abs().sum(0)


def exactly(expected: Tensor) -> Tensor:
    """Return the bound of an answer that takes no rounding at all: zero."""
    return torch.zeros_like(expected, dtype=torch.float64)
