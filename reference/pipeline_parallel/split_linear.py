"""A linear layer whose backward can leave the weights' gradients for later.

Autograd computes both gradients of a linear layer at once. Zero-bubble schedules need the input's at once and the
weights' when there is time, without walking the graph twice: so this layer's backward returns the input's gradient
and, while somebody collects, puts the weights' part on a list instead of computing it.

Paper: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Deferred = list[Callable[[], None]]


class SplitLinear(nn.Linear):
    """`nn.Linear` with the same parameters, numbers and errors; only its backward can be split."""

    deferred: Deferred | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias`: `[..., in_features]` to `[..., out_features]`."""
        return _SplitLinear.apply(input, self.weight, self.bias, self)


@contextmanager
def deferring(module: nn.Module) -> Iterator[Deferred]:
    """Collect the weights' gradients of every `SplitLinear` in `module` while backwards run inside; call them later."""
    deferred: Deferred = []
    layers = [layer for layer in module.modules() if isinstance(layer, SplitLinear)]
    for layer in layers:
        layer.deferred = deferred
    try:
        yield deferred
    finally:
        for layer in layers:
            layer.deferred = None


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, layer: SplitLinear) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.layer, ctx.has_bias = layer, bias is not None
        return nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        input, weight = ctx.saved_tensors
        input_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        layer: SplitLinear = ctx.layer
        if layer.deferred is None:
            return input_gradient, *_weight_gradients(input, gradient, ctx.has_bias), None
        layer.deferred.append(lambda: _accumulate(layer, *_weight_gradients(input, gradient, ctx.has_bias)))
        return input_gradient, None, None, None


@torch.no_grad()  # called outside of any backward, too
def _weight_gradients(input: Tensor, gradient: Tensor, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    rows = gradient.flatten(0, -2)
    return rows.T @ input.flatten(0, -2), rows.sum(0) if has_bias else None


@torch.no_grad()
def _accumulate(layer: SplitLinear, weight_gradient: Tensor, bias_gradient: Tensor | None) -> None:
    for parameter, gradient in ((layer.weight, weight_gradient), (layer.bias, bias_gradient)):
        if gradient is None or not parameter.requires_grad:
            continue
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
