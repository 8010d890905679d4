"""Communication that autograd can differentiate: pairs of conjugate operations.

The gradient of a sum over ranks is a copy to ranks, and the other way round; of a gather a scatter. Each pair
below is one linear map and its transpose, so each is the other's backward:

    copy              <-> reduce (all-reduce)     Megatron's f and g (Shoeybi et al. 2019, section 3)
    gather            <-> scatter                 every rank holds the whole; its gradient is the whole's
    all_gather        <-> reduce_scatter          Megatron's g and g-bar (Korthikanti et al. 2022, 4.2.2)
    all_to_all        <-> all_to_all, sizes swapped

`gather` and `all_gather` have the same forward. After `gather` every rank computes the *same* thing with the
whole, so the gradient is there already and a slice is enough; after `all_gather` each rank computes
*something else* (its own columns, its own heads), so the gradients are partial sums and must be reduced.

Gradients are made contiguous before they travel: autograd may hand over any stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import comm
from .comm import Group


def copy(tensor: Tensor, group: Group) -> Tensor:
    """Identity forward, all-reduce backward: enter a region where each rank computes something else."""
    return _Copy.apply(tensor, group) if group.size > 1 else tensor


def reduce(tensor: Tensor, group: Group) -> Tensor:
    """All-reduce forward (a new tensor), identity backward: leave such a region."""
    return _Reduce.apply(tensor, group) if group.size > 1 else tensor


def gather(tensor: Tensor, group: Group, dim: int = -1) -> Tensor:
    """All-gather along `dim` forward, own part backward."""
    return _Gather.apply(tensor, group, dim) if group.size > 1 else tensor


def scatter(tensor: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Own part along `dim` forward, all-gather backward."""
    return _Scatter.apply(tensor, group, dim) if group.size > 1 else tensor


def all_gather(tensor: Tensor, group: Group, dim: int = 0) -> Tensor:
    """All-gather along `dim` forward, reduce-scatter backward."""
    return _AllGather.apply(tensor, group, dim) if group.size > 1 else tensor


def reduce_scatter(tensor: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Reduce-scatter along `dim` forward, all-gather backward."""
    return _ReduceScatter.apply(tensor, group, dim) if group.size > 1 else tensor


def all_to_all(
    tensor: Tensor,
    group: Group,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Exchange blocks of rows forward, and their gradients the other way backward.

    Args:
        tensor: `[sum(input_sizes), ...]`.
        group: Who takes part.
        output_sizes: Rows that come from each index; equal blocks where left out.
        input_sizes: Rows that go to each index; equal blocks where left out.

    Returns:
        `[sum(output_sizes), ...]`, in group order.
    """
    if group.size == 1:
        return tensor
    return _AllToAll.apply(tensor, group, output_sizes, input_sizes)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return comm.all_gather(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return comm.chunk(gradient, ctx.group, ctx.dim)[ctx.group.rank].contiguous(), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return comm.chunk(tensor, group, dim)[group.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return comm.all_gather(gradient, ctx.group, ctx.dim), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return comm.all_gather(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return comm.reduce_scatter(gradient, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return comm.reduce_scatter(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return comm.all_gather(gradient, ctx.group, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        group: Group,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
    ) -> Tensor:
        ctx.group, ctx.output_sizes, ctx.input_sizes = group, output_sizes, input_sizes
        return _exchanged(tensor, group, output_sizes, input_sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.group, ctx.input_sizes, ctx.output_sizes), None, None, None


def _summed(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total, group).wait()
    return total


def _exchanged(
    tensor: Tensor, group: Group, output_sizes: Sequence[int] | None, input_sizes: Sequence[int] | None
) -> Tensor:
    rows = tensor.shape[0] if output_sizes is None else sum(output_sizes)
    output = tensor.new_empty(rows, *tensor.shape[1:])
    comm.all_to_all_into(output, tensor.contiguous(), group, output_sizes, input_sizes).wait()
    return output
