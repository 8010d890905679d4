"""Ring attention: queries stay, keys and values go round the ring, partial results merge.

In step j rank r holds the keys and values of rank r - j. While it attends to them, they already travel on. The
backward goes round once more, and the gradients of keys and values travel along until they are home.

Bytes sent per rank, with KV = 2 b s/p kv_heads d e this rank's keys and values: forward (p-1) KV; backward (p-1) KV
and p KV of their gradients (in float32 at least).
Memory: s/p of everything, and two more KV buffers. Never a score matrix of the whole sequence.
Balance: with the zigzag layout and a causal mask every rank computes the same number of scores in every step.
Paper: Liu et al. 2023, "Ring Attention with Blockwise Transformers", section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import comm
from ..comm import Group
from .block import attend, attend_backward, merge
from .layout import Layout


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    *,
    causal: bool = True,
    layout: Layout = Layout.ZIGZAG,
    scale: float | None = None,
) -> Tensor:
    """Return this rank's part of attention over the whole sequence.

    Args:
        query: `[b, heads, s/p, d]`, this rank's tokens in the layout's order.
        key: `[b, kv_heads, s/p, d]`; `heads` is a multiple of `kv_heads`.
        value: As `key`.
        group: The context parallel ranks.
        causal: Tokens see only themselves and earlier ones.
        layout: How the sequence was split.
        scale: What scores are multiplied by; `1 / sqrt(d)` where left out.

    Returns:
        `[b, heads, s/p, d]`.

    Raises:
        ValueError: Query heads do not divide by key heads, or a zigzag part of odd length.
    """
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads do not divide by {key.shape[1]} key heads")
    if causal and layout is Layout.ZIGZAG and query.shape[2] % 2:
        raise ValueError(f"a zigzag part has an early and a late half, but this one has {query.shape[2]} tokens")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _RingAttention.apply(query, key, value, group, _Mask(causal, layout), scale)


@dataclass(frozen=True)
class _Block:
    """Some of this rank's queries against some of the visiting keys: slices along the sequence."""

    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True)
class _Mask:
    causal: bool
    layout: Layout

    def blocks(self, here: int, origin: int, length: int) -> tuple[_Block, ...]:
        """Return what rank `here` computes with the keys that came from rank `origin`."""
        everything, late, early = slice(None), slice(length // 2, None), slice(0, length // 2)
        if not self.causal:
            return (_Block(everything, everything, causal=False),)
        if self.layout is Layout.CONTIGUOUS:
            return (_Block(everything, everything, causal=origin == here),) if origin <= here else ()
        if origin == here:
            # The early part before the late part: the order within a rank is the order in the sequence.
            return (_Block(everything, everything, causal=True),)
        if origin < here:
            return (_Block(everything, early, causal=False),)
        return (_Block(late, everything, causal=False),)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Group, mask: _Mask, scale: float) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros_like(query, dtype=wide)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=wide, device=query.device)
        for origin, (visiting_key, visiting_value) in _round(torch.stack([key, value]), group):
            for block in mask.blocks(group.rank, origin, query.shape[2]):
                part = attend(
                    query[:, :, block.queries],
                    visiting_key[:, :, block.keys],
                    visiting_value[:, :, block.keys],
                    causal=block.causal,
                    scale=scale,
                )
                output[:, :, block.queries], lse[:, :, block.queries] = merge(
                    output[:, :, block.queries], lse[:, :, block.queries], *part
                )
        merged = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, merged, lse)
        ctx.group, ctx.mask, ctx.scale = group, mask, scale
        return merged

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value, output, lse = ctx.saved_tensors
        group: Group = ctx.group
        wide = lse.dtype
        of_query = torch.zeros_like(query, dtype=wide)
        travelling = torch.zeros(2, *key.shape, dtype=wide, device=key.device)
        arriving = torch.empty_like(travelling)
        gradient = gradient.contiguous()
        for origin, (visiting_key, visiting_value) in _round(torch.stack([key, value]), group):
            own = torch.zeros_like(travelling)
            for block in ctx.mask.blocks(group.rank, origin, query.shape[2]):
                parts = attend_backward(
                    gradient[:, :, block.queries],
                    query[:, :, block.queries],
                    visiting_key[:, :, block.keys],
                    visiting_value[:, :, block.keys],
                    output[:, :, block.queries],
                    lse[:, :, block.queries].contiguous(),
                    causal=block.causal,
                    scale=ctx.scale,
                )
                of_query[:, :, block.queries] += parts[0]
                own[0, :, :, block.keys] += parts[1]
                own[1, :, :, block.keys] += parts[2]
            travelling += own
            # After p shifts, each with the keys that it belongs to, a gradient is back where its keys came from.
            comm.ring_shift(travelling, arriving, group).wait()
            travelling, arriving = arriving, travelling
        return of_query.to(query.dtype), *travelling.to(key.dtype).unbind(), None, None, None


def _round(mine: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield (origin, keys and values) for every rank once, own first; the next ones travel while these are used."""
    current = mine
    for step in range(group.size):
        is_last = step == group.size - 1
        coming = torch.empty_like(current)
        travel = None if is_last else comm.ring_shift(current, coming, group)
        yield (group.rank - step) % group.size, current
        if travel is not None:
            travel.wait()
        current = coming
