"""Column- and row-parallel linear layers, with or without sequence parallelism.

    column: W is cut by output features, each rank computes its own outputs     (needs the whole input)
    row:    W is cut by input features, each rank computes a partial sum        (leaves a sum over ranks)

A column layer followed by a row layer needs one communication at each end, however wide the layer between is.

Bytes sent per rank and layer, b s h e the activation: without sequence parallelism one all-reduce forward (row) and
one backward (column), 2(t-1)/t b s h e each; with it an all-gather and a reduce-scatter each way, (t-1)/t b s h e
each, and one more all-gather in the backward, since the column layer keeps only its part of the input.
Memory: parameters / t; the column layer's input whole, or 1/t of it with sequence parallelism.
Overlap: in the backward, the input gradient travels while the weights' gradient is computed.
Papers: Shoeybi et al. 2019, "Megatron-LM", section 3; Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models", section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import autograd, comm
from ..comm import Group, Pending

SEQUENCE = 1
"""The dimension of `[batch, sequence, hidden]` that sequence parallelism splits."""


class ColumnParallelLinear(nn.Module):
    """`y = x W^T + b`, this rank's part of the output features.

    Args:
        in_features: Size of the input.
        out_features: Of the whole output; each rank computes `out_features / t`.
        group: The tensor parallel ranks.
        bias: Whether there is one; it is split as the outputs are.
        sequence_parallel: The input arrives split along the sequence.

    Raises:
        ValueError: `out_features` does not divide by the group's size.
    """

    def __init__(
        self, in_features: int, out_features: int, group: Group, *, bias: bool = True, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        own = split_evenly(out_features, group, "output features")
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = nn.Parameter(torch.empty(own, in_features))
        self.bias = nn.Parameter(torch.empty(own)) if bias else None

    @torch.no_grad()
    def load_whole(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take this rank's rows of the whole weight `[out_features, in_features]` and bias `[out_features]`."""
        self.weight.copy_(weight.chunk(self.group.size)[self.group.rank])
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias.chunk(self.group.size)[self.group.rank])

    def forward(self, input: Tensor) -> Tensor:
        """`[b, s, in]`, or `[b, s/t, in]` with sequence parallelism, to `[b, s, out/t]`."""
        if self.group.size == 1:
            return F.linear(input, self.weight, self.bias)
        return _Column.apply(input, self.weight, self.bias, self.group, self.sequence_parallel)


class RowParallelLinear(nn.Module):
    """`y = x W^T + b`, from this rank's part of the input features.

    The bias is whole on every rank and added once, after the sum: added before, it would count t times.

    Args:
        in_features: Of the whole input; each rank holds `in_features / t`.
        out_features: Size of the output.
        group: The tensor parallel ranks.
        bias: Whether there is one. With sequence parallelism its gradient is a partial sum, to be reduced over `group`
            (see `finalize`), as each rank saw other tokens.
        sequence_parallel: The output leaves split along the sequence.

    Raises:
        ValueError: `in_features` does not divide by the group's size.
    """

    def __init__(
        self, in_features: int, out_features: int, group: Group, *, bias: bool = True, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        own = split_evenly(in_features, group, "input features")
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = nn.Parameter(torch.empty(out_features, own))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    @torch.no_grad()
    def load_whole(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take this rank's columns of the whole weight `[out_features, in_features]`, and the whole bias."""
        self.weight.copy_(weight.chunk(self.group.size, dim=1)[self.group.rank])
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    def forward(self, input: Tensor) -> Tensor:
        """`[b, s, in/t]` to `[b, s, out]`, or to `[b, s/t, out]` with sequence parallelism."""
        partial = F.linear(input, self.weight)
        if self.sequence_parallel:
            output = autograd.reduce_scatter(partial, self.group, SEQUENCE)
        else:
            output = _reduce_in_place(partial, self.group)
        return output if self.bias is None else output + self.bias


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence_parallel: bool
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.group, ctx.sequence_parallel, ctx.has_bias = group, sequence_parallel, bias is not None
        whole = comm.all_gather(input, group, SEQUENCE) if sequence_parallel else input
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        input, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            input = comm.all_gather(input, ctx.group, SEQUENCE)
        input_gradient = gradient @ weight
        travel, reduced = _start_reduction(input_gradient, ctx.group, ctx.sequence_parallel)
        rows = gradient.flatten(0, -2)
        weight_gradient = rows.T @ input.flatten(0, -2)
        bias_gradient = rows.sum(0) if ctx.has_bias else None
        travel.wait()
        return reduced, weight_gradient, bias_gradient, None, None


def _start_reduction(gradient: Tensor, group: Group, sequence_parallel: bool) -> tuple[Pending, Tensor]:
    """Start summing the input's gradient over ranks; return what to wait for, and where the sum will lie."""
    if not sequence_parallel:
        return comm.all_reduce(gradient, group), gradient
    parts = torch.cat(comm.chunk(gradient, group, SEQUENCE))
    own = torch.empty_like(parts[: gradient.shape[0]])
    return comm.reduce_scatter_into(own, parts, group), own


class _ReduceInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(partial)
        comm.all_reduce(partial, group).wait()
        return partial

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _reduce_in_place(partial: Tensor, group: Group) -> Tensor:
    """As `autograd.reduce`, without its copy: nobody else holds the partial sum."""
    return _ReduceInPlace.apply(partial, group) if group.size > 1 else partial


def split_evenly(size: int, group: Group, what: str) -> int:
    """Return `size / t`; raise `ValueError` where it does not divide."""
    if size % group.size:
        raise ValueError(f"{size} {what} do not divide by {group.size} tensor parallel ranks")
    return size // group.size
