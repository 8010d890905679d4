"""Ulysses: swap the split of the sequence for a split of the heads, attend, and swap back.

Bytes sent per rank: forward 4 all-to-alls (query, key, value, output) of (p-1)/p b h s/p e each, backward the same.
With fewer key heads than query heads, keys and values are that much smaller; with fewer key heads than ranks they are
repeated first, so that every rank has one.
Memory: s/p of everything outside attention; inside, heads / p over the whole sequence.
Paper: Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import autograd
from ..comm import Group
from .layout import Layout, positions


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    *,
    causal: bool = True,
    layout: Layout = Layout.CONTIGUOUS,
    scale: float | None = None,
) -> Tensor:
    """Return this rank's part of attention over the whole sequence.

    Args:
        query: `[b, heads, s/p, d]`, this rank's tokens in the layout's order.
        key: `[b, kv_heads, s/p, d]`; `heads` is a multiple of `kv_heads`.
        value: As `key`.
        group: The context parallel ranks.
        causal: Tokens see only themselves and earlier ones.
        layout: How the sequence was split; heads see it in its own order again.
        scale: What scores are multiplied by; `1 / sqrt(d)` where left out.

    Returns:
        `[b, heads, s/p, d]`.

    Raises:
        ValueError: Query heads do not divide by the ranks or by the key heads, or neither key heads by ranks nor ranks
            by key heads.
    """
    key, value = (_enough_heads(tensor, query, group) for tensor in (key, value))
    whole = (sequence_to_heads(tensor, group, layout) for tensor in (query, key, value))
    attended = F.scaled_dot_product_attention(*whole, is_causal=causal, scale=scale, enable_gqa=True)
    return heads_to_sequence(attended, group, layout)


def sequence_to_heads(tensor: Tensor, group: Group, layout: Layout) -> Tensor:
    """`[b, heads, s/p, d]` to `[b, heads/p, s, d]`, the sequence in its own order."""
    if group.size == 1:
        return tensor
    blocks = torch.stack(tensor.chunk(group.size, dim=1))  # (p, b, heads/p, s/p, d): one block a destination
    arrived = autograd.all_to_all(blocks, group)
    joined = arrived.movedim(0, 2).flatten(2, 3)
    return joined.index_select(2, _order(joined.shape[2], group, layout).argsort().to(tensor.device))


def heads_to_sequence(tensor: Tensor, group: Group, layout: Layout) -> Tensor:
    """The inverse: `[b, heads/p, s, d]` to `[b, heads, s/p, d]`."""
    if group.size == 1:
        return tensor
    ordered = tensor.index_select(2, _order(tensor.shape[2], group, layout).to(tensor.device))
    blocks = torch.stack(ordered.chunk(group.size, dim=2))
    return autograd.all_to_all(blocks, group).movedim(0, 1).flatten(1, 2)


def _order(length: int, group: Group, layout: Layout) -> Tensor:
    return torch.cat([positions(length, rank, group.size, layout) for rank in range(group.size)])


def _enough_heads(tensor: Tensor, query: Tensor, group: Group) -> Tensor:
    """Repeat key heads where there are fewer than ranks, so that they can be split over them."""
    heads, own = query.shape[1], tensor.shape[1]
    if heads % group.size or heads % own or (own % group.size and group.size % own):
        raise ValueError(f"{heads} query heads and {own} key heads cannot be split over {group.size} ranks")
    return tensor if own % group.size == 0 else tensor.repeat_interleave(group.size // own, dim=1)
